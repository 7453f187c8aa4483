"""A specification with every name looked up and every dimension filled in.

This is the part of planning that does not depend on the rows of a step; drafts get this far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kpipe.codegen.ops.contract import Access, Contract, Kind, Operand, Release
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan.bind import Memory, memory_of
from kpipe.codegen.plan.dims import check_softmax, resolve_dims
from kpipe.codegen.plan.join_repairs import repair_missing_joins
from kpipe.codegen.plan.memory import derive_pitches, plan_buffers, plan_caches, plan_mailboxes
from kpipe.codegen.plan.model import BufferPlan, CachePlan, MailboxPlan
from kpipe.codegen.plan.modes import Mode, read_mode
from kpipe.codegen.plan.names import check_names
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.stages import Slot, check_words, resolve_stages
from kpipe.codegen.plan.targets import resolve_targets
from kpipe.codegen.spec.document import Mapping as MappingNode
from kpipe.codegen.spec.document import find
from kpipe.codegen.spec.load import Source
from kpipe.codegen.spec.models import Geometry, Pipeline
from kpipe.codegen.spec.rows import RowsError, parse_rows


@dataclass(frozen=True)
class Resolved:
    """Everything about a spec that holds for all rows."""

    spec: Pipeline
    geometry: Geometry
    source: Source
    geometry_source: Source
    targets: tuple[str, ...]
    rows: Mapping[int, tuple[int, ...]]  # q -> row counts
    dims: Mapping[str, int]
    buffers: tuple[BufferPlan, ...]
    mailboxes: tuple[MailboxPlan, ...]
    caches: tuple[CachePlan, ...]
    memory: Memory
    contracts: Mapping[str, Contract]
    slots: Mapping[str, Slot]  # word of a mode -> what it may become
    modes: Mapping[str, Mode]
    missing: frozenset[str] = field(default=frozenset())

    @property
    def rows_cap(self) -> int:
        """Largest declared row count."""
        return max(row for rows in self.rows.values() for row in rows)

    @property
    def context_parallel(self) -> bool:
        """True where contexts are sharded."""
        return self.spec.parallel.dcp is not None


def resolve(
    spec: Pipeline, geometry: Geometry, source: Source, geometry_source: Source, report: Report
) -> Resolved:
    """Look up every name of the spec; errors go to the report."""
    _check_parallel(spec, report)
    _check_rope(geometry, geometry_source, report)
    targets = resolve_targets(spec, report)
    rows = _rows(spec, report)
    dims = resolve_dims(spec, geometry, geometry_source, report)
    check_softmax(geometry, geometry_source, dims, report)
    report.stop_on_errors()
    derive_pitches(spec, dims, report)
    rows_cap = max(row for counts in rows.values() for row in counts)
    buffers = plan_buffers(spec, dims, rows_cap, report)
    mailboxes = plan_mailboxes(spec, dims, rows_cap, report)
    caches = plan_caches(spec, dims, report)
    report.stop_on_errors()
    contracts = {**CONTRACTS, **_external(spec)}
    missing = frozenset(spec.draft.missing if spec.draft else ())
    modes = _modes(spec, report)
    check_names(spec, modes, report)
    slots = resolve_stages(spec, contracts, missing, targets, rows, report)
    _check_rearm(spec, contracts, slots, missing, report)
    check_words(spec, modes, slots, report)
    repair_missing_joins(spec, modes, slots, contracts, report)
    memory = memory_of(spec, dims, rows_cap, buffers, mailboxes)
    return Resolved(
        spec, geometry, source, geometry_source, targets, rows, dims, buffers, mailboxes, caches,
        memory, contracts, slots, modes, missing,
    )  # fmt: skip


def _check_parallel(spec: Pipeline, report: Report) -> None:
    tp, dcp = spec.parallel.tp, spec.parallel.dcp
    if dcp is None:
        for key in ("interleave", "transport"):
            if key in spec.parallel.model_fields_set:
                report.error(
                    "KP109",
                    f"`parallel.{key}` is read under context parallelism only, and `dcp` is not "
                    "given",
                    report.source.span("parallel", key, key=True),
                    help=f"set `dcp`, or leave `{key}` out",
                )
        return
    span = report.source.span("parallel", "dcp")
    if tp % dcp:
        report.error(
            "KP110", f"tp {tp} is not a multiple of dcp {dcp}", span, help="set dcp equal to tp"
        )
    elif tp != dcp:
        report.error(
            "KP110",
            f"dcp {dcp} differs from tp {tp}: heads are gathered over the ranks that share a "
            "context",
            span,
            help=f"set dcp: {tp}, or leave dcp out",
        )


def _check_rope(geometry: Geometry, source: Source, report: Report) -> None:
    for name, kind in geometry.rope:
        if kind != "none":
            report.error(
                "KP130",
                f"`rope.{name}: {kind}` is part of the language, but no op rotates yet",
                source.span("rope", name),
                allowed=("none",),
                help=f"write `{name}: none`",
            )


def _rows(spec: Pipeline, report: Report) -> dict[int, tuple[int, ...]]:
    counts: tuple[int, ...] = ()
    for key, text in (("batches", spec.rows.batches), ("wide", spec.rows.wide)):
        if key == "wide" and not text:
            continue
        try:
            counts += parse_rows(text)
        except RowsError as error:
            span = report.source.span("rows", key)
            report.extend([error.diagnostic(text, span, f"rows.{key}")])
    rows: dict[int, tuple[int, ...]] = {}
    for position, q in enumerate(spec.rows.queries):
        span = report.source.span("rows", "queries", position)
        if q < 1 or q in rows:
            message = f"q {q} is listed twice" if q in rows else f"q counts from 1, not {q}"
            help = "list every query length once" if q in rows else "1 is plain decode"
            report.error("KP120", f"rows.queries: {message}", span, help=help)
            continue
        rows[q] = tuple(sorted({row for row in counts if row % q == 0}))
        if counts and not rows[q]:
            message = f"rows.queries: no declared row count is a multiple of {q}"
            help = f"declare such rows, for example {q}, or delete the {q}"
            report.error("KP123", message, span, help=help)
    report.stop_on_errors()
    return rows


def _modes(spec: Pipeline, report: Report) -> dict[str, Mode]:
    modes = {}
    for name in spec.overlap.modes:
        node = find(report.source.root, ("overlap", "modes", name))
        span = report.source.span("overlap", "modes", name, key=True)
        if isinstance(node, MappingNode):
            modes[name] = read_mode(name, node, span, report)
    return modes


def _check_rearm(
    spec: Pipeline,
    contracts: Mapping[str, Contract],
    slots: Mapping[str, Slot],
    missing: frozenset[str],
    report: Report,
) -> None:
    """Whoever re-arms a mailbox is an op that can, or a word of the modes that becomes one."""
    able = sorted(n for n, c in contracts.items() if any(o.access.rearms for o in c.operands))
    chosen = [word for word, slot in slots.items() if {*slot.choices} & {*able}]
    for name, mailbox in spec.mailboxes.items():
        if mailbox.rearmed_by not in (*able, *chosen, *missing):
            span = report.source.span("mailboxes", name, "rearmed_by")
            report.unknown("op that re-arms a mailbox:", mailbox.rearmed_by, span, able)


def _external(spec: Pipeline) -> dict[str, Contract]:
    """Opaque ops of the engine as contracts: they never wait and never release."""
    contracts = {}
    for name, external in spec.external.items():
        operands = tuple(
            Operand(target, Kind.BUFFER, access, (), "")
            for access, targets in ((Access.READ, external.reads), (Access.WRITE, external.writes))
            for target in targets
        )
        contracts[name] = Contract(
            name, external.doc, operands, "", source="external", waits=False, release=Release.NEVER
        )
    return contracts
