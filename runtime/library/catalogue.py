"""Which library ops can be launched, and what launches them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kpipe.runtime.library.flash_mla import FlashMlaSparse
from kpipe.runtime.library.site import Site
from kpipe.runtime.library.value_bmm import ValueBmm
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.op import Call, Op

ADAPTERS = {"flashmla_sparse": FlashMlaSparse, "value_bmm": ValueBmm}
"""Op -> what calls its library; made for one layer, then called like the reference function."""


def refusals(ops: Iterable[Op]) -> list[str]:
    """Why library ops among `ops` cannot be launched here, a sentence each."""
    found = []
    for op in ops:
        if op.kernel or op.source == "kpipe":
            continue
        if op.name not in ADAPTERS:
            found.append(
                f"the library op {op.name} ({op.source}) is not launched by this version; choose "
                "another op in `variants`"
            )
        elif reason := ADAPTERS[op.name].refusal():
            found.append(f"{op.name} {reason}")
    return found


class LibraryOp:
    """An op that a library runs, called with the step's tensors.

    It is launched plain: a library's kernels take no launch attributes from here.  `calls` are
    those that the layer can make; each number of rows is made ready at once.
    """

    def __init__(
        self,
        op: Op,
        bound: Mapping[str, Any],
        site: Site,
        calls: Iterable[Call],
        enter: Callable[[Op], None],
    ) -> None:
        self.op = op
        self._bound = dict(bound)
        self._enter = enter
        self._run = ADAPTERS[op.name](site)
        for rows in sorted({call.rows for call in calls if call.op == op.name}):
            self._run.ready(rows)

    def __call__(
        self, *operands: Any, pdl: bool = False, release: bool = False, **named: Any
    ) -> None:
        if pdl:
            raise LayerError(f"{self.op.name} cannot be launched with the PDL attribute")
        self._enter(self.op)
        self._run(*operands, **self._bound, **named)
