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
    """Why library ops among `ops` cannot be launched here: those that nothing calls yet in one
    sentence, every other with its own reason."""
    foreign = [op for op in ops if not op.kernel and op.source != "kpipe"]
    unknown = [f"{op.name} ({op.source})" for op in foreign if op.name not in ADAPTERS]
    found = []
    if unknown:
        found.append(
            f"this version does not launch the library ops {', '.join(unknown)}; choose others in "
            "`variants`"
        )
    for op in foreign:
        reason = ADAPTERS[op.name].refusal() if op.name in ADAPTERS else ""
        if reason:
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


class UnusedOp:
    """An op that no step of the prepared architecture launches: its library is not asked, a build
    need not have its kernel."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def __call__(self, *operands: Any, **named: Any) -> None:
        raise LayerError(
            f"{self.op.name} is launched by no step of the architecture that was prepared for"
        )
