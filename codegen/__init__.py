"""Generator side of kpipe: reads a pipeline specification and writes kernels and their driver."""
