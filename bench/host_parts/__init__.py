"""What the host does in an eager step: calls that are timed, and kernels that do nothing."""
