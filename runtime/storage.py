"""Which tensors lie on the same bytes: the schedule is proved for memory that does not overlap.

A proof speaks of names.  Whether two names are two memories is known only where tensors are bound,
so that is where it is looked at, byte by byte and without touching the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Protocol


@dataclass(frozen=True)
class Block:
    """Bytes of one name: `count` pieces of `bytes` bytes each, the first at address `base`, the
    next ones `stride` bytes further on.  Memory that nobody writes may be shared freely."""

    name: str
    base: int
    bytes: int
    count: int = 1
    stride: int = 0
    written: bool = True

    @property
    def end(self) -> int:
        """The address behind the last byte; `base` where there is none."""
        if not self.count or not self.bytes:
            return self.base
        return self.base + (self.count - 1) * self.stride + self.bytes

    def meets(self, begin: int, end: int) -> bool:
        """Whether a byte of the block lies in the half-open range of addresses."""
        if not self.bytes or begin >= min(end, self.end) or end <= self.base:
            return False
        if self.count == 1 or self.stride <= self.bytes:
            return True
        # The last piece that begins ahead of `end` is the only one that need be looked at.
        piece = min((end - 1 - self.base) // self.stride, self.count - 1)
        return self.base + piece * self.stride + self.bytes > begin

    def pieces(self) -> Iterator[tuple[int, int]]:
        """The half-open range of every piece."""
        for number in range(self.count):
            begin = self.base + number * self.stride
            yield begin, begin + self.bytes


def overlaps(blocks: Iterable[Block]) -> list[tuple[Block, Block]]:
    """Every two blocks that have a byte in common and of which one is written, by address."""
    found = []
    active: list[Block] = []
    for block in sorted(blocks, key=lambda block: (block.base, block.name)):
        active = [other for other in active if other.end > block.base]
        found += [(other, block) for other in active if _share(other, block)]
        if block.end > block.base:
            active.append(block)
    return found


def _share(first: Block, second: Block) -> bool:
    if not (first.written or second.written):
        return False
    few, many = sorted((first, second), key=lambda block: block.count)
    return any(many.meets(begin, end) for begin, end in few.pieces())


class Tensor(Protocol):
    """What is asked of a tensor."""

    shape: tuple[int, ...]

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def element_size(self) -> int:
        """Bytes of an element."""
        ...

    def stride(self) -> tuple[int, ...]:
        """Distance of neighbours along each axis, in elements."""
        ...


def block_of(name: str, tensor: Tensor, *, written: bool = True) -> Block:
    """The bytes of a tensor that is contiguous but for its first axis.

    Any other layout counts as everything from its first byte to its last.
    """
    shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    base = tensor.data_ptr()
    if 0 in shape:
        return Block(name, base, 0, 1, 0, written)
    inner = 1
    for axis in range(len(shape) - 1, 0, -1):
        if shape[axis] > 1 and strides[axis] != inner:
            last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
            return Block(name, base, (last + 1) * size, 1, 0, written)
        inner *= shape[axis]
    if not shape or shape[0] == 1 or strides[0] == inner:
        return Block(name, base, prod(shape) * size, 1, 0, written)
    return Block(name, base, inner * size, shape[0], strides[0] * size, written)
