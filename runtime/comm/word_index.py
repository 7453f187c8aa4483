"""Index tuples of a mailbox, checked against its shape and turned into 4-byte words."""

from __future__ import annotations

from operator import index as as_integer

WORD_BYTES = 4


def axis_ranges(index: object, shape: tuple[int, ...], rows_axis: int) -> tuple[range, ...]:
    """The positions that `index` selects along each axis of `shape`.

    `index` holds non-negative integers, slices with non-negative bounds and a positive step, and
    at most one Ellipsis.  An integer counts as a range of one.  Unlike a tensor's own indexing,
    a slice that reaches beyond an axis is an error.  Raises ValueError.
    """
    parts = _expand(index if isinstance(index, tuple) else (index,), len(shape))
    return tuple(
        _axis_range(part, axis, shape[axis], axis == rows_axis) for axis, part in enumerate(parts)
    )


def word_ranges(ranges: tuple[range, ...], itemsize: int) -> tuple[range, ...]:
    """The same region with its last axis counted in 4-byte words.

    `itemsize` is the size of an element in bytes.  Raises ValueError where the last axis has a
    step or does not begin and end on a word.
    """
    last = ranges[-1]
    if last.step != 1:
        raise ValueError(f"the last axis is indexed with step {last.step}; words have step 1")
    start, stop = last.start * itemsize, last.stop * itemsize
    if start % WORD_BYTES or stop % WORD_BYTES:
        raise ValueError(
            f"bytes {start}:{stop} of the last axis are not whole words of {WORD_BYTES} bytes"
        )
    return (*ranges[:-1], range(start // WORD_BYTES, stop // WORD_BYTES))


def slices(ranges: tuple[range, ...]) -> tuple[slice, ...]:
    """An index tuple for `ranges` that keeps every axis."""
    return tuple(slice(part.start, part.stop, part.step) for part in ranges)


def _expand(index: tuple, axes: int) -> tuple:
    """One entry per axis; Ellipsis and missing trailing entries become whole axes."""
    if sum(part is Ellipsis for part in index) > 1:
        raise ValueError("the index has more than one Ellipsis")
    given = sum(part is not Ellipsis for part in index)
    if given > axes:
        raise ValueError(f"the index has {given} entries, the mailbox {axes} axes")
    at = next((place for place, part in enumerate(index) if part is Ellipsis), len(index))
    whole = (slice(None),) * (axes - given)
    return (*index[:at], *whole, *index[at + 1 :])


def _axis_range(part: object, axis: int, size: int, is_rows: bool) -> range:
    if isinstance(part, slice):
        start = 0 if part.start is None else as_integer(part.start)
        stop = size if part.stop is None else as_integer(part.stop)
        step = 1 if part.step is None else as_integer(part.step)
    else:
        try:
            start = as_integer(part)
        except TypeError:
            raise ValueError(
                f"axis {axis} is indexed by {type(part).__name__}; "
                "only integers, slices and Ellipsis give a view"
            ) from None
        stop, step = start + 1, 1
    if start < 0 or stop < 0 or step < 1:
        raise ValueError(f"axis {axis} is indexed by {part}; negative places are not allowed")
    if max(start, stop) > size:
        reached = max(start, stop)
        if is_rows:
            raise ValueError(f"the index reaches {reached} rows, rows_cap is {size}")
        raise ValueError(f"the index reaches {reached} places of axis {axis}, which has {size}")
    return range(start, max(start, stop), step)
