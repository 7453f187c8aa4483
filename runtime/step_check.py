"""Whether a step fits a prepared layer; what has passed once passes again at little cost.

The verdict is a function of where the step's tensors lie and how they are laid out, of q, and of
what the layer was prepared with.  So a step of which all of that is as in one that has passed has
passed, and anything else is looked at from the beginning.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any

from torch import Tensor

from kpipe.runtime.metadata import (
    MOST_SAVED,
    STEP_OUTPUTS,
    LayerError,
    Step,
    TensorSpec,
    check_tensors,
    given,
    names_of,
)
from kpipe.runtime.rows import check_rows
from kpipe.runtime.storage import Block, block_of, overlaps

MOST_LAYOUTS = 8
"""Layouts that have passed and are kept, the newest first: an engine comes back with a few."""
MOST_FORMS = 256
"""Forms (layouts without addresses) that have passed and are kept: one for each number of rows."""


class StepCheck:
    """The check of the steps of one layer.

    `specs` are the tensors of a step that it declares, `fixed` the blocks that it has bound.
    Raises LayerError where those share storage.
    """

    def __init__(self, name: str, specs: Mapping[str, TensorSpec], fixed: Iterable[Block]) -> None:
        self._name = name
        self._specs = specs
        self._fixed = list(fixed)
        self._refuse_overlaps(self._fixed)
        self._edges = _edges(self._fixed)
        self._passed: deque[Any] = deque(maxlen=MOST_LAYOUTS)
        self._forms: set[Any] = set()

    def check(self, step: Step) -> None:
        """Raises LayerError for tensors that are missing, superfluous, of other shapes or dtypes,
        or share storage with each other or with the layer's; ValueError for rows that do not
        belong to requests."""
        layout = (
            step.q,
            [
                (value.data_ptr(), value.shape, value.stride(), value.dtype)
                if isinstance(value, Tensor)
                else None
                for value in _fields_of(type(step))(step)
            ],
        )
        if layout in self._passed:
            return
        form = (step.q, *[one and one[1:] for one in layout[1]])
        if form not in self._forms:
            self._check_form(step)
            if len(self._forms) >= MOST_FORMS:
                self._forms.clear()
            self._forms.add(form)
        self._check_storage(step)
        self._passed.appendleft(layout)

    def _check_form(self, step: Step) -> None:
        sizes = {"rows": step.rows, "requests": step.rows // step.q}
        check_rows(step.rows, step.lengths, step.block_table, step.q, self._name)
        check_tensors(f"{self._name} step", given(step), self._specs, sizes)
        if step.saved is not None and step.saved.shape[0] > MOST_SAVED:
            raise LayerError(
                f"{self._name} step: {step.saved.shape[0]} saved blocks; at most {MOST_SAVED} are "
                "mixed"
            )

    def _check_storage(self, step: Step) -> None:
        tensors = given(step)
        if self._lie_clear(tensors):
            return
        blocks = [
            block_of(f"step {name}", tensor, written=name in STEP_OUTPUTS)
            for name, tensor in tensors.items()
        ]
        self._refuse_overlaps([*self._fixed, *blocks])

    def _lie_clear(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether even the ranges that the tensors span meet nothing; False says nothing."""
        spans = {name: _span(tensor) for name, tensor in tensors.items()}
        for begin, end in spans.values():
            place = bisect_right(self._edges, begin)
            if place % 2 or bisect_left(self._edges, end) != place:
                return False
        for name in STEP_OUTPUTS:
            if name in spans:
                begin, end = spans.pop(name)
                if any(begin < theirs and mine < end for mine, theirs in spans.values()):
                    return False
        return True

    def _refuse_overlaps(self, blocks: list[Block]) -> None:
        found = [f"{one.name} and {other.name}" for one, other in overlaps(blocks)]
        if found:
            raise LayerError(
                f"{self._name}: {', '.join(found)} share storage; the schedule is proved for "
                "memory that does not overlap (KP601): give each its own"
            )


@cache
def _fields_of(record: type) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gives what a record's fields hold, q left out."""
    return attrgetter(*(name for name in names_of(record) if name != "q"))


def _edges(blocks: Iterable[Block]) -> list[int]:
    """Beginnings and ends, in turn, of the ranges that the blocks span, those that touch as one."""
    edges: list[int] = []
    for begin, end in sorted((block.base, block.end) for block in blocks if block.end > block.base):
        if edges and begin <= edges[-1]:
            edges[-1] = max(edges[-1], end)
        else:
            edges += (begin, end)
    return edges


def _span(tensor: Tensor) -> tuple[int, int]:
    """The half-open range of addresses from a tensor's first byte to its last."""
    if tensor.is_contiguous():
        begin = tensor.data_ptr()
        return begin, begin + tensor.numel() * tensor.element_size()
    block = block_of("", tensor)
    return block.base, block.end
