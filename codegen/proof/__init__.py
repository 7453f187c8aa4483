"""The proof: happens-before over launches, from a program of kernels, streams and events."""
