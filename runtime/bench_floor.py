"""The fewest bytes a launch must move, and the time that takes at the bandwidth of the memory.

Weights count once, cache rows as often as different requests read them, activations once each
way.  Scores count as they are: written by one launch and read by the next.  Of a context that is
sharded over ranks a rank reads its share; mailboxes do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import DTYPES

BANDWIDTH = 4.3e12  # bytes a second: a plain read stream on one H200


def launch_bytes(layer: type[Layer], op: str, rows: int, q: int, context: int) -> int:
    """Bytes that one launch of an op must move through device memory."""
    declared = {known.name: known for known in layer.OPS}[op]
    weights = sum(weight_bytes(layer, name) for name in declared.weights)
    return weights + cache_bytes(layer, op, rows, q, context)


def weight_bytes(layer: type[Layer], name: str) -> int:
    """Size of one weight."""
    spec = layer.MEMORY.weights[name]
    return prod(int(axis) for axis in spec.shape) * DTYPES[spec.dtype].itemsize


def cache_bytes(layer: type[Layer], op: str, rows: int, q: int, context: int) -> int:
    """Bytes of the paged caches that an op must read; inserts of single rows do not count."""
    ranks = layer.RANKS if layer.CONTEXT_PARALLEL else 1
    if op.startswith("index_scores"):
        return rows // q * context // ranks * layer.MEMORY.cache_format("index_kv").row_bytes
    if "sparse" in op:
        row_bytes = layer.MEMORY.cache_format("latent_kv").row_bytes
        return rows * min(int(layer.MEMORY.geometry["top_k"]), context) // ranks * row_bytes
    return 0


def floor_us(layer: type[Layer], ops: Sequence[str], rows: int, q: int, context: int) -> float:
    """Least microseconds of a layer: every weight once and the cache rows that are read."""
    declared = {known.name: known for known in layer.OPS}
    names: Iterable[str] = {name for op in ops for name in declared[op].weights}
    total = sum(weight_bytes(layer, name) for name in names)
    total += sum(cache_bytes(layer, op, rows, q, context) for op in ops)
    return total / BANDWIDTH * 1e6
