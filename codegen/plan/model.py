"""The plan: what one step launches, in host order, on which streams, with which flags.

Everything here is frozen and free of references to the YAML tree, so that a plan can be
compared, hashed and printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.contract import Access, Contract, Kind, Path, Phase, Tactic

MAIN = "main"
SHARED_SCOPES = ("model", "device")  # of buffers that other pipelines may declare as well


@dataclass(frozen=True)
class Binding:
    """One operand of one launch, bound to memory.

    The hash leaves the enumerations out: theirs are slow, and names tell bindings apart.
    """

    operand: str
    target: str  # buffer, column, mailbox, cache, step tensor or weight
    kind: Kind = field(hash=False)
    access: Access = field(hash=False)
    phase: Phase = field(hash=False)
    conditional: bool  # exists under a flag only; passed by keyword
    path: Path = field(default=Path.GENERIC, hash=False)


@dataclass(frozen=True)
class Pdl:
    """How a launch overlaps its neighbours in the stream.

    A `rule` is given where the proof took an overlap back: the rule of the edge set behind it, with
    `captured: ` in front where it is lost under capture only.
    """

    attribute: bool  # launched with programmatic stream serialisation
    release: bool  # lets its successor start early
    attribute_reason: str
    release_reason: str
    attribute_rule: str = ""
    release_rule: str = ""


@dataclass(frozen=True)
class Launch:
    """One kernel launch (or library call)."""

    index: int
    op: str  # name of the contract
    name: str  # op, or op_tag for an instance
    word: str  # as the mode says it (the slot, where a variant chose the op)
    stage: str
    stream: str
    contract: Contract = field(repr=False)
    bindings: tuple[Binding, ...]
    flags: tuple[tuple[str, bool], ...]
    options: tuple[tuple[str, str], ...]  # words of the stage
    arguments: tuple[tuple[str, str], ...]  # words that the call passes, by keyword
    tactic: Tactic
    pdl: Pdl
    span: Span

    def binding(self, operand: str) -> Binding | None:
        """The binding of an operand, or None where the launch has no such operand."""
        return next((b for b in self.bindings if b.operand == operand), None)

    @property
    def identity(self) -> tuple:
        """What makes two launches the same line of code."""
        return (self.name, self.stream, self.bindings, self.flags, self.arguments, self.pdl)


@dataclass(frozen=True)
class Fork:
    """`stream` starts behind everything launched on `origin` so far."""

    stream: str
    origin: str
    span: Span


@dataclass(frozen=True)
class Join:
    """`target` waits for everything launched on `stream` so far."""

    stream: str
    target: str
    span: Span


Item = Launch | Fork | Join


@dataclass(frozen=True)
class StepPlan:
    """The plan of one (rows, q, arch)."""

    rows: int
    q: int
    arch: str
    mode: str
    asked_mode: str  # what the table says, before a fallback
    items: tuple[Item, ...]
    cores: tuple[tuple[str, str], ...]  # slot -> op, where a variant chose
    head_rows: int  # head rows of one core launch, padding included

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The launches in host order."""
        return tuple(item for item in self.items if isinstance(item, Launch))

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams in order of first use, main first."""
        return tuple(dict.fromkeys([MAIN, *(launch.stream for launch in self.launches)]))

    @property
    def identity(self) -> tuple:
        """Plans with equal identity are the same method of the generated class."""
        return tuple(
            item.identity if isinstance(item, Launch) else (type(item).__name__, *_ends(item))
            for item in self.items
        )


def _ends(item: Fork | Join) -> tuple[str, str]:
    return (item.stream, item.origin if isinstance(item, Fork) else item.target)


@dataclass(frozen=True)
class BufferPlan:
    """A buffer with its sizes filled in; `shape` may hold the names rows and rows_cap."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    scope: str
    columns: tuple[tuple[str, int, int], ...]  # name, offset, width
    zeroed: bool
    bytes: int  # at rows_cap
    axes: tuple[str, ...]  # the shape expressions as the spec says them


@dataclass(frozen=True)
class MailboxPlan:
    """A mailbox: every rank owns `parities` copies of `shape`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sentinel: int
    parities: int
    rearmed_by: str
    bytes: int
    axes: tuple[str, ...]  # the shape expressions as the spec says them
    source_axis: int  # places along this axis belong to writers,
    source_stride: int  # this many places to each


@dataclass(frozen=True)
class CachePlan:
    """A paged cache and its byte format."""

    name: str
    format: str
    page: int
    row_bytes: int
    manager_page: int | None = None  # tokens per page of the engine's pool, where it differs
    max_blocks: int | None = None  # largest number of blocks addressed


@dataclass(frozen=True)
class TensorPlan:
    """A weight or step tensor that the engine hands in."""

    name: str
    shape: tuple[int | str, ...]  # names: rows, requests, pages, index_pages, blocks
    dtype: str
    axes: tuple[str, ...]  # the shape expressions as the contract says them
    written: bool = False


@dataclass(frozen=True)
class Method:
    """One straight-line method of the generated class."""

    name: str
    plan: StepPlan  # a representative; all its plans have the same identity
    uses: tuple[tuple[str, int, tuple[int, ...]], ...]  # arch, q, rows


@dataclass(frozen=True)
class PipelinePlan:
    """Everything that the renderer needs, for all rows, queries and archs."""

    name: str
    doc: str
    path: str
    geometry: str
    dims: Mapping[str, int]
    scalars: Mapping[str, float]
    numerics: Mapping[str, str]
    parallel: Mapping[str, int | str | None]
    targets: tuple[str, ...]
    rows: tuple[tuple[int, tuple[int, ...]], ...]  # q -> row counts
    buffers: tuple[BufferPlan, ...]
    mailboxes: tuple[MailboxPlan, ...]
    caches: tuple[CachePlan, ...]
    weights: tuple[TensorPlan, ...]
    step: tuple[TensorPlan, ...]
    ops: tuple[Contract, ...]  # every op of every declared mode, sorted by name
    stages: Mapping[str, str]  # op -> stage
    settled: Mapping[str, Mapping[str, bool]]  # op -> flags that are the same for all rows
    tactics: Mapping[str, tuple[tuple[str, int, Tactic], ...]]  # op -> (arch, most rows, fields)
    plans: tuple[StepPlan, ...]
    methods: tuple[Method, ...]
    modes: tuple[str, ...]
    fallbacks: tuple[tuple[str, str, str], ...]  # mode, replacement, reason
    environment: Mapping[str, str]
    streams: tuple[tuple[str, int], ...]  # side streams and their priority
    begin_step: tuple[Launch, ...] = ()
    status: Literal["not proved", "proved"] = "not proved"

    @property
    def rows_cap(self) -> int:
        """Rows that every buffer and mailbox is sized for."""
        return max(row for _, rows in self.rows for row in rows)

    @property
    def context_parallel(self) -> bool:
        """True where contexts are sharded over ranks."""
        return self.parallel["dcp"] is not None

    @property
    def shares_memory(self) -> bool:
        """Whether it declares a buffer that other pipelines may share."""
        return any(buffer.scope in SHARED_SCOPES for buffer in self.buffers)

    def kernel(self, op: Contract) -> str:
        """The op's kernel template; empty where it has none, or none for these numerics and this
        kind of parallelism."""
        suits = all(self.numerics[point] == value for point, value in op.fixes)
        serves = op.kernel_when in ("", "dcp" if self.context_parallel else "!dcp")
        return op.kernel if suits and serves else ""

    @property
    def missing_kernels(self) -> tuple[str, ...]:
        """Ops of ours whose kernel comes later."""
        return tuple(op.name for op in self.ops if not self.kernel(op) and op.source == "kpipe")
