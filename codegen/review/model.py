"""What differs between two plans of a pipeline, as data: frozen, comparable, free of wording."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kpipe.codegen.diagnostics import Diagnostic
from kpipe.codegen.review.captured import Edge
from kpipe.codegen.review.side import Verdict

LaunchKind = Literal[
    "moved", "added", "removed", "replaced", "issued", "flags", "options", "tile", "operands",
    "start", "release",
]  # fmt: skip
State = Literal["changed", "same", "new", "deleted", "refused", "draft", "no base"]


@dataclass(frozen=True)
class Rename:
    """One thing under another name: `kind` is what it is, for example "buffer" or "mode"."""

    kind: str
    before: str
    after: str


@dataclass(frozen=True)
class LaunchChange:
    """What changed of one launch; `before` and `after` say it in the words of the plan.

    moved: stream and place.  added, removed: stream and place.  replaced: `name` stands where
    `before` stood.  issued: the host issues a side stream at another place.  start, release: the
    overlap with the predecessor and with the successor; `effect` is then gained, dropped, weakened
    or reason.
    """

    kind: LaunchKind
    name: str
    before: str
    after: str
    effect: str = ""


@dataclass(frozen=True)
class EdgeChange:
    """An edge of the predicted graph that came, went or changed its port: `before` or `after` is
    None where it is absent.  `implied`: on the side without it, other edges order the two all the
    same."""

    before: Edge | None
    after: Edge | None
    implied: bool = False


@dataclass(frozen=True)
class ListChange:
    """Two launch lists: what the rows that share it ran before, and what they run now."""

    method_before: str
    method_after: str
    mode_before: str
    mode_after: str
    timeline_before: tuple[str, ...]
    timeline_after: tuple[str, ...]
    launches: tuple[LaunchChange, ...]
    edges: tuple[EdgeChange, ...]
    streams: tuple[int, int]
    nodes: tuple[int, int]
    edge_counts: tuple[int, int]
    programmatic: tuple[int, int]
    head_rows: tuple[int, int]  # of the core; 0, 0 where they are the same
    parted: tuple[tuple[str, tuple[str, ...]], ...]  # may no longer run beside these
    met: tuple[tuple[str, tuple[str, ...]], ...]  # may now run beside these
    numerics: tuple[str, ...]


@dataclass(frozen=True)
class RowRange:
    """Consecutive declared row counts of one (arch, q) with one and the same change.

    `state`: changed; same (`mode_before` and `mode_after` may still differ, where two modes launch
    alike); new or gone, where only one side declares the rows.  Times are predictions in us a
    layer, one per row count; empty on a side that lacks the rows.  `change` is the position of the
    ListChange, -1 where there is none.
    """

    arch: str
    q: int
    rows: tuple[int, ...]
    mode_before: str
    mode_after: str
    state: Literal["changed", "same", "new", "gone"]
    change: int
    times_before: tuple[float, ...]
    times_after: tuple[float, ...]
    path_before: tuple[str, ...]  # critical path at the least of the rows
    path_after: tuple[str, ...]

    @property
    def timed(self) -> bool:
        """Whether both sides have a predicted time."""
        return bool(self.times_before and self.times_after)

    @property
    def deltas(self) -> tuple[float, ...]:
        """Predicted change of a layer's time, us, per row count."""
        pairs = zip(self.times_before, self.times_after, strict=False)
        return tuple(after - before for before, after in pairs)


@dataclass(frozen=True)
class Setting:
    """A declaration that differs; `before` or `after` is empty where it is absent."""

    section: str
    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Memory:
    """Bytes that prepare() sets aside on one rank, at the largest declared row count.

    `workspaces` are the private ones of ops, each at the largest size that any step needs.
    """

    buffers: int
    mailboxes: int
    workspaces: int

    @property
    def total(self) -> int:
        """All of it: nothing of it is ever freed or shared, so this is the peak as well."""
        return self.buffers + self.mailboxes + self.workspaces


@dataclass(frozen=True)
class FileChange:
    """A generated file that differs, and why.

    `effect`: new, removed, changed, or comments (a Python file whose code is the same).  `causes`:
    spec (it follows from the specification), template, tool (other templates or another kpipe than
    the ones that wrote the old side's file).  `disk`: how the file in the working tree stands to
    what kpipe would write now: current, stale, missing, hand edit, orphan.
    """

    path: str
    effect: str
    causes: tuple[str, ...]
    disk: str


@dataclass(frozen=True)
class Files:
    """Generated files.  `compared` says with what: the old side's folder or a rendering.

    `written`: whether the old side and the working tree have the folder at all.
    """

    folder: str
    compared: str
    changes: tuple[FileChange, ...]
    written: tuple[bool, bool] = (True, True)

    @property
    def never_written(self) -> bool:
        """A pipeline that nobody has generated: how its files stand on disk says nothing."""
        return not any(self.written)

    @property
    def kernels(self) -> tuple[FileChange, ...]:
        """Kernel files whose bytes differ."""
        listed = (one for one in self.changes if one.path.startswith("kernels/") and one.effect)
        return tuple(one for one in listed if not one.path.endswith("__init__.py"))


@dataclass(frozen=True)
class EvidenceChange:
    """A launch whose evidence differs; states as in `codegen.evidence`, empty: no such launch."""

    arch: str
    op: str
    rows: tuple[int, ...]
    before: str
    after: str


@dataclass(frozen=True)
class Difference:
    """One pipeline, old side to new side.

    `before` and `after` are the verdicts of the proof, None for a side without the pipeline.
    `found` are errors of the new side, `warnings` its warnings, `old_found` errors of the old one.
    """

    name: str
    path: str
    state: State
    before: Verdict | None
    after: Verdict | None
    renames: tuple[Rename, ...] = ()
    ranges: tuple[RowRange, ...] = ()
    lists: tuple[ListChange, ...] = ()
    settings: tuple[Setting, ...] = ()
    numerics: tuple[str, ...] = ()
    memory: tuple[Memory, Memory] | None = None
    files: Files | None = None
    evidence: tuple[EvidenceChange, ...] = ()
    evidence_totals: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()  # of a new or deleted pipeline
    found: tuple[Diagnostic, ...] = field(default=())
    warnings: tuple[Diagnostic, ...] = field(default=())
    old_found: tuple[Diagnostic, ...] = field(default=())

    @property
    def changed_ranges(self) -> tuple[RowRange, ...]:
        """Row ranges whose schedule differs."""
        return tuple(one for one in self.ranges if one.state != "same")


@dataclass(frozen=True)
class Review:
    """All pipelines of one run; `base` is the old side in words, `command` repeats the run."""

    base: str
    command: str
    pipelines: tuple[Difference, ...]
    notes: tuple[str, ...] = ()

    @property
    def found(self) -> tuple[Diagnostic, ...]:
        """Every error of the new side."""
        return tuple(d for one in self.pipelines for d in one.found)
