"""Torch implementation of every op: the oracle of the kernels and the CPU backend of a layer.

A function takes the passed operands of its contract in contract order, everything else by
keyword, and writes its outputs in place.
"""
