"""Kernels compiled ahead of time: objects, the manifest that names them, how they are loaded."""
