"""Ops that libraries run on the GPU. Importing this package imports none of the libraries."""
