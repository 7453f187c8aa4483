"""The planner: specification to plan, for every (arch, q, rows)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.plan.assemble import assemble, check_used
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.plan.modes import Mode
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.plan.step import Known, asked_mode, choices, plan_step
from kpipe.codegen.plan.tables import Cell, Table, read_table
from kpipe.codegen.spec.document import Scalar, find


def declared_steps(resolved: Resolved) -> tuple[tuple[str, int, int], ...]:
    """Every step that the spec declares, as (arch, q, rows), in the order of the plan."""
    return tuple(
        (arch, q, rows)
        for arch in resolved.targets
        for q, counts in resolved.rows.items()
        for rows in counts
    )


def build_plan(resolved: Resolved, report: Report, only: str = "") -> PipelinePlan:
    """The plan of a resolved spec.  Raises SpecError with every error found.

    With `only` every step takes that mode, whatever the table says, or none where the mode is not
    legal: a mode that no step selects is looked at this way.
    """
    table = mode_table(resolved, report)
    report.stop_on_errors()
    plans: list[StepPlan] = []
    fallbacks: dict[tuple[str, str, str], None] = {}
    known: dict[tuple[object, ...], StepPlan] = {}
    lists: Known = {}
    for place in declared_steps(resolved):
        cell = table.at(*place)
        mode = _mode_at(resolved, cell, only, fallbacks, report) if cell else None
        if mode is not None and cell is not None:
            plans.append(_step(resolved, place, mode, cell, known, lists, report))
    check_used(resolved, plans, report)
    report.stop_on_errors()
    return assemble(resolved, tuple(plans), tuple(fallbacks), report)


def build_mode(resolved: Resolved, mode: str) -> PipelinePlan | None:
    """The plan in which every step that can take `mode` takes it; the others are left out.

    A mode that no step selects need not be complete for all rows: an op that a variant chooses
    there may lack what it reads.  None where no step can take it.
    """
    table = mode_table(resolved, Report(resolved.source))
    plans: list[StepPlan] = []
    if not illegal(resolved, mode):
        for arch, q, rows in declared_steps(resolved):
            report, cell = Report(resolved.source), table.at(arch, q, rows)
            if cell is not None:
                plan = plan_step(resolved, arch, q, rows, resolved.modes[mode], cell, report)
                plans += [] if report.found else [replace(plan, rows=rows)]
    return assemble(resolved, tuple(plans), (), Report(resolved.source)) if plans else None


def plan_mode(
    resolved: Resolved,
    mode: Mode,
    places: Sequence[tuple[str, int, int]],
    report: Report,
    table: Table | None = None,
) -> PipelinePlan:
    """The plan of one mode, which need not be in the spec, for steps given as arch, q, rows.

    The table, the spec's own where none is given, says nothing but that these steps are declared.
    Raises SpecError with every error found.
    """
    resolved = replace(resolved, modes={**resolved.modes, mode.name: mode})
    table = table or mode_table(resolved, report)
    known: dict[tuple[object, ...], StepPlan] = {}
    lists: Known = {}
    plans = []
    for place in places:
        cell = table.at(*place)
        if cell is not None:
            plans.append(_step(resolved, place, mode, cell, known, lists, report))
    report.stop_on_errors()
    return assemble(resolved, tuple(plans), (), report)


def _step(
    resolved: Resolved,
    place: tuple[str, int, int],
    mode: Mode,
    cell: Cell,
    known: dict[tuple[object, ...], StepPlan],
    lists: Known,
    report: Report,
) -> StepPlan:
    """The plan of one step, planned once for all steps of equal choices."""
    arch, q, rows = place
    key = (arch, q, mode.name, *choices(resolved, arch, q, rows, mode))
    if key not in known:
        known[key] = plan_step(resolved, arch, q, rows, mode, cell, report, lists)
    return replace(known[key], rows=rows, asked_mode=asked_mode(cell))


def _mode_at(
    resolved: Resolved,
    cell: Cell,
    only: str,
    fallbacks: dict[tuple[str, str, str], None],
    report: Report,
) -> Mode | None:
    if only:
        return None if illegal(resolved, only) else resolved.modes[only]
    return _legal_mode(resolved, cell, fallbacks, report)


def mode_table(resolved: Resolved, report: Report) -> Table:
    """The table that holds here; the other one is checked as well."""
    overlap = resolved.spec.overlap
    table = _modes_by_rows(resolved, "table", report)
    if overlap.table_unfused is not None:
        unfused = _modes_by_rows(resolved, "table_unfused", report)
        table = table if resolved.spec.features.fused_indexer else unfused
    for mode, replacement in overlap.fallback.items():
        for word, is_key in ((mode, True), (replacement, False)):
            if word not in resolved.modes:
                span = report.source.span("overlap", "fallback", mode, key=is_key)
                report.unknown("mode", word, span, resolved.modes)
    return table


def _modes_by_rows(resolved: Resolved, key: str, report: Report) -> Table:
    node = find(resolved.source.root, ("overlap", key))
    assert node is not None  # the model has seen it
    table = read_table(node, f"overlap.{key}", resolved.targets, resolved.rows, report)
    for cell in table.values():
        name = cell.value.raw if isinstance(cell.value, Scalar) else ""
        if not name:
            place = cell.value.span if not isinstance(cell.value, Scalar) else cell.span
            message = f"`overlap.{key}` takes the name of a mode here"
            report.error("KP101", message, place, allowed=resolved.modes)
        elif name not in resolved.modes:
            report.unknown("mode", name, cell.value.span, resolved.modes)
    return table


def _legal_mode(
    resolved: Resolved, cell: Cell, fallbacks: dict[tuple[str, str, str], None], report: Report
) -> Mode | None:
    """The mode of a cell, or what replaces it where it is not legal here."""
    name = cell.value.raw if isinstance(cell.value, Scalar) else ""
    tried: list[str] = []
    while True:
        reason = illegal(resolved, name)
        if not reason:
            return resolved.modes[name]
        tried.append(name)
        replacement = resolved.spec.overlap.fallback.get(name)
        if replacement is None or replacement in tried:
            report.error(
                "KP104",
                f"mode `{name}` is not legal here: {reason}",
                cell.value.span,
                help=f"choose another mode, or say what replaces it: `fallback: {{{name}: ...}}`",
            )
            return None
        fallbacks[(name, replacement, reason)] = None
        name = replacement


def illegal(resolved: Resolved, name: str) -> str:
    """Why the declared mode `name` may not stand in this spec; empty where it may."""
    facts = {
        "dcp": resolved.context_parallel,
        "fused_indexer": resolved.spec.features.fused_indexer,
    }
    for fact, wanted in resolved.modes[name].requires:
        if facts[fact] != wanted:
            return f"it {'needs' if wanted else 'excludes'} {fact}"
    return ""


def refuse_unbuilt(resolved: Resolved) -> None:
    """Words of the language that the generator does not emit yet; raises SpecError."""
    report = Report(resolved.source)
    spec = resolved.spec
    if spec.draft:
        names = ", ".join(f"`{name}`" for name in spec.draft.missing)
        have = "has" if len(spec.draft.missing) == 1 else "have"
        report.error(
            "KP130",
            f"`{spec.name}` is a draft: {names} {have} no contract yet",
            report.source.span("draft"),
            help="it can be checked, not generated",
        )
        raise SpecError(tuple(report.found))
    for section in ("step", "external", "prefetch"):
        if getattr(spec, section):
            report.error(
                "KP130",
                f"`{section}` is part of the language, but kpipe does not generate it yet",
                report.source.span(section, key=True),
                help="mark the spec as a draft to have it checked",
            )
    for name, buffer in spec.buffers.items():
        if buffer.scope == "step":
            report.error(
                "KP130",
                f"buffer `{name}`: scope `step` is written by `step` stages, which kpipe does not "
                "generate yet",
                report.source.span("buffers", name, "scope"),
                help="mark the spec as a draft, or give it the scope `kind`",
            )
    if report.found:
        raise SpecError(tuple(report.found))
