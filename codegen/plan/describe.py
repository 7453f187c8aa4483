"""A plan for people: everything that was decided, and why."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kpipe.codegen.diagnostics import Diagnostic, SpecError, did_you_mean
from kpipe.codegen.ops.contract import Contract, Release
from kpipe.codegen.plan.columns import columns, flow, section, wrap
from kpipe.codegen.plan.model import Fork, Join, Launch, Method, PipelinePlan, StepPlan
from kpipe.codegen.plan.workspace import workspaces

if TYPE_CHECKING:
    from kpipe.codegen.plan.wire_report import WireReport

_MIB = 1024 * 1024


def matching_steps(
    plan: PipelinePlan, rows: int | None, q: int | None, arch: str | None
) -> tuple[StepPlan, ...]:
    """Every step that the selection names, several per launch list; without one, all steps.

    Raises SpecError KP808, with what is declared, for rows, a query length or an architecture
    that the spec does not declare.
    """
    check_declared(plan.rows, plan.targets, rows, q, arch)
    return tuple(
        step
        for step in plan.plans
        if rows in (None, step.rows) and q in (None, step.q) and arch in (None, step.arch)
    )


def check_declared(
    declared: Iterable[tuple[int, Sequence[int]]],
    targets: Sequence[str],
    rows: int | None,
    q: int | None,
    arch: str | None,
) -> None:
    """Raise SpecError KP808 for what is not among `declared` (row counts by q) and `targets`."""
    listed = tuple(declared)
    queries = [query for query, _ in listed]
    counts = sorted({count for query, found in listed if q in (None, query) for count in found})
    found = [
        *undeclared("q", q, queries, ""),
        *(undeclared("rows", rows, counts, _next(rows, counts)) if counts else ()),
        *undeclared("arch", arch, targets, _near(arch, targets)),
    ]
    if found:
        raise SpecError(found)


def select_plans(
    plan: PipelinePlan, rows: int | None, q: int | None, arch: str | None
) -> tuple[StepPlan, ...]:
    """The steps that the selection names; without one, the first step of each launch list.

    Raises SpecError KP808 as `matching_steps`.
    """
    chosen = matching_steps(plan, rows, q, arch)
    if rows is None and q is None and arch is None:
        return tuple(method.plan for method in plan.methods)
    if rows is not None:
        return chosen
    first: dict[tuple, StepPlan] = {}
    for step in chosen:
        first.setdefault((step.arch, step.q, step.identity), step)
    return tuple(first.values())


def undeclared(
    option: str, given: object, declared: Sequence[object], help: str
) -> tuple[Diagnostic, ...]:
    """KP808 for the value of an option that the spec does not declare; nothing for None."""
    if given is None or given in declared:
        return ()
    message = f"`--{option} {given}`: the spec does not declare it"
    allowed = tuple(str(value) for value in declared)
    return (Diagnostic("KP808", message, None, allowed=allowed, help=help),)


def _next(rows: int | None, declared: Sequence[int]) -> str:
    larger = [count for count in declared if rows is not None and count >= rows]
    return f"a step of {rows} rows is padded to {larger[0]}" if larger else ""


def _near(arch: str | None, targets: Sequence[str]) -> str:
    near = did_you_mean(arch or "", targets)
    return f"did you mean `{near}`?" if near else ""


def describe_text(
    plan: PipelinePlan,
    rows: int | None = None,
    q: int | None = None,
    arch: str | None = None,
    wire: WireReport | None = None,
) -> str:
    """The plan as text, at most 110 columns wide.

    Header, the printed total table, fallbacks, dimensions, memory, ops, `wire` where ranks exchange
    words, and the launches of the selected steps (default: one step per launch list).  Raises
    SpecError as `select_plans`.
    """
    steps = select_plans(plan, rows, q, arch)
    sections = [
        _header(plan),
        section("table", _table(plan)),
        section("fallbacks", columns(_fallback_rows(plan)), empty="none was needed"),
        section("dimensions", flow(f"{name} {value}" for name, value in plan.dims.items())),
        section(f"buffers at {plan.rows_cap} rows", _buffers(plan)),
        section("mailboxes", _mailboxes(plan), empty="none"),
        section("caches", _caches(plan), empty="none"),
        section("weights", flow(_tensors(plan.weights)), empty="none"),
        section("step inputs", flow(_tensors(plan.step)), empty="none"),
        section("ops", _ops(plan)),
        *_wire(wire),
        *(_step(plan, step) for step in steps),
    ]
    return "\n".join(sections)


def _wire(report: WireReport | None) -> list[str]:
    if report is None:
        return []
    from kpipe.codegen.plan.describe_wire import wire_text

    return [wire_text(report)]


def _header(plan: PipelinePlan) -> str:
    def pairs(values: Iterable[tuple[str, object]]) -> str:
        return ", ".join(f"{key} {value}" for key, value in values if value is not None)

    rows = [
        ("spec", plan.path),
        ("geometry", plan.geometry),
        ("parallel", pairs(plan.parallel.items())),
        ("targets", ", ".join(plan.targets)),
        *((f"rows, q {q}", row_list(counts)) for q, counts in plan.rows),
        ("environment", pairs(plan.environment.items())),
        ("numerics", pairs(plan.numerics.items())),
        ("scalars", pairs((key, f"{value:.8g}") for key, value in plan.scalars.items())),
        ("streams", ", ".join(["main", *(f"{name} (priority {p})" for name, p in plan.streams)])),
        ("modes", ", ".join(plan.modes)),
        ("schedule", plan.status),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [plan.name, *(wrap(plan.doc, "  ", "  ") if plan.doc else [])]
    for name, value in rows:
        lines += wrap(value, f"  {name:<{width}}  ", " " * (width + 4))
    return "\n".join(lines) + "\n"


def row_list(counts: Iterable[int]) -> str:
    """Row counts as the spec writes them: 1, 2, 3, 8 gives `1-3, 8`."""
    runs: list[list[int]] = []
    for count in sorted(counts):
        if runs and count == runs[-1][1] + 1:
            runs[-1][1] = count
        else:
            runs.append([count, count])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _method_of(plan: PipelinePlan, step: StepPlan) -> Method:
    return next(m for m in plan.methods if m.plan.identity == step.identity)


def table_rows(plan: PipelinePlan) -> list[tuple[StepPlan, str, tuple[int, ...]]]:
    """Steps grouped by everything but their rows: a step, its method, the row counts."""
    names = {method.plan.identity: method.name for method in plan.methods}
    groups: dict[tuple, tuple[StepPlan, str, list[int]]] = {}
    for step in plan.plans:
        name = names[step.identity]
        key = (step.arch, step.q, step.asked_mode, step.mode, name, step.cores, step.head_rows)
        groups.setdefault(key, (step, name, []))[2].append(step.rows)
    return [(step, name, tuple(counts)) for step, name, counts in groups.values()]


def _table(plan: PipelinePlan) -> list[str]:
    groups = table_rows(plan)
    names = dict.fromkeys(name for _, name, _ in groups)
    numbers = {name: f"#{number}" for number, name in enumerate(names, 1)}
    slots = tuple(dict.fromkeys(slot for step, _, _ in groups for slot, _ in step.cores))
    rows = [("list", "arch", "q", "rows", "mode", "head rows", *slots)]
    for step, name, counts in groups:
        mode = step.mode if step.mode == step.asked_mode else f"{step.asked_mode} -> {step.mode}"
        heads = str(step.head_rows) if step.head_rows else ""
        chosen = dict(step.cores)
        cores = (chosen.get(slot, "") for slot in slots)
        rows.append((numbers[name], step.arch, str(step.q), row_list(counts), mode, heads, *cores))
    return [*columns(rows), "", *flow(f"{number} {name}" for name, number in numbers.items())]


def _fallback_rows(plan: PipelinePlan) -> list[tuple[str, ...]]:
    return [(f"{mode} -> {other}", reason) for mode, other, reason in plan.fallbacks]


def _buffers(plan: PipelinePlan) -> list[str]:
    rows = [("name", "shape", "dtype", "scope", "MiB", "")]
    for buffer in plan.buffers:
        axes = ", ".join(map(str, buffer.shape))
        note = "zeroed once" if buffer.zeroed else ""
        rows.append(
            (buffer.name, f"[{axes}]", buffer.dtype, buffer.scope, _mib(buffer.bytes), note)
        )
    rows.append(("total", "", "", "", _mib(sum(b.bytes for b in plan.buffers)), ""))
    lines = columns(rows, right=(4,))
    for buffer in plan.buffers:
        if buffer.columns:
            listed = (f"{name} {offset}+{width}" for name, offset, width in buffer.columns)
            lines += ["", f"  columns of {buffer.name} (offset+width)", *flow(listed, "    ")]
    return lines


def _mailboxes(plan: PipelinePlan) -> list[str]:
    if not plan.mailboxes:
        return []
    rows = [("name", "shape of one parity", "dtype", "parities", "sentinel", "re-armed by", "MiB")]
    for box in plan.mailboxes:
        shape = f"[{', '.join(map(str, box.shape))}]"
        word = f"0x{box.sentinel:08X}"
        rows.append(
            (box.name, shape, box.dtype, str(box.parities), word, box.rearmed_by, _mib(box.bytes))
        )
    rows.append(("total", "", "", "", "", "", _mib(sum(box.bytes for box in plan.mailboxes))))
    return columns(rows, right=(6,))


def _caches(plan: PipelinePlan) -> list[str]:
    if not plan.caches:
        return []
    rows = [("name", "format", "tokens per page", "bytes per token")]
    rows += [(c.name, c.format, str(c.page), str(c.row_bytes)) for c in plan.caches]
    return columns(rows)


def _tensors(tensors: Iterable) -> Iterable[str]:
    for tensor in tensors:
        written = " written" if tensor.written else ""
        yield f"{tensor.name} [{', '.join(map(str, tensor.shape))}] {tensor.dtype}{written}"


def _ops(plan: PipelinePlan) -> list[str]:
    def kernel(op: Contract) -> str:
        if op.source != "kpipe":
            return f"library: {op.source}"
        return "kernel" if plan.kernel(op) else "no kernel yet"

    groups: dict[str, list[str]] = {}
    for op in plan.ops:
        groups.setdefault(kernel(op), []).append(op.name)
    lines: list[str] = []
    width = max(len(name) for name in groups)
    for name in sorted(groups, key=lambda word: (word != "kernel", word)):
        lines += wrap(", ".join(groups[name]), f"  {name:<{width}}  ", " " * (width + 4))
    return lines


def _step(plan: PipelinePlan, step: StepPlan) -> str:
    method = _method_of(plan, step)
    uses = "; ".join(f"{arch} q {q} rows {row_list(rows)}" for arch, q, rows in method.uses)
    lines = wrap(f"{method.name}, for {uses}", "", "  ")
    lines += [f"  shown for {step.arch}, q {step.q}, rows {step.rows}", ""]
    rows: list[tuple[str, ...]] = [("", "stream", "op", "stage", "pdl", "release", "place")]
    details: list[list[str]] = [[]]
    for item in step.items:
        if isinstance(item, Launch):
            rows.append(_launch_row(item))
            details.append(_launch_details(item))
        else:
            verb, stream = _edge(item)
            rows.append(("", stream, verb, "", "", "", _place(item)))
            details.append([])
    for line, detail in zip(columns(rows), details, strict=True):  # never wrapped: short words
        lines += [line, *detail]
    lines += _workspaces(plan, step)
    return "\n".join(lines) + "\n"


def _workspaces(plan: PipelinePlan, step: StepPlan) -> list[str]:
    """Core head rows and private workspaces, where the step has any."""
    lines = [f"  core over {step.head_rows} head rows"] if step.head_rows else []
    for workspace in workspaces(plan, step):
        cleared = ", cleared once" if workspace.zero_once else ""
        lines.append(
            f"  workspace {workspace.op}.{workspace.name} {_mib(workspace.bytes)} MiB{cleared}"
        )
    return lines


def _edge(item: Fork | Join) -> tuple[str, str]:
    if isinstance(item, Fork):
        return f"fork {item.stream}", item.origin
    return f"join {item.stream}", item.target


def _launch_row(launch: Launch) -> tuple[str, ...]:
    return (
        str(launch.index + 1),
        launch.stream,
        launch.name,
        launch.stage,
        "yes" if launch.pdl.attribute else "plain",
        _release(launch),
        _place(launch),
    )


def _release(launch: Launch) -> str:
    if launch.pdl.release:
        return "yes"
    words = {Release.NEVER: "never", Release.SOME_BLOCKS: "some", Release.LIBRARY: "library"}
    return words.get(launch.contract.release, "held")


def _launch_details(launch: Launch) -> list[str]:
    """What does not fit a column: why PDL is held back, flags, options, tile."""
    words = []
    pdl = launch.pdl
    reasons = [] if pdl.attribute else [pdl.attribute_reason]
    reasons += [f"release {pdl.release_reason}"] if pdl.release else [pdl.release_reason]
    words.append("; ".join(reasons))
    flags = [name if value else f"not {name}" for name, value in launch.flags]
    if flags:
        words.append(f"flags {', '.join(flags)}")
    pairs = [f"{name}={value}" for name, value in (*launch.options, *launch.tactic)]
    if pairs:
        words.append(", ".join(pairs))
    return wrap(" | ".join(words), "      ", "        ")


def _place(item: Launch | Fork | Join) -> str:
    return f"{os.path.basename(item.span.path)}:{item.span.line}"


def _mib(size: int) -> str:
    text = f"{size / _MIB:.2f}"
    return "<0.01" if size and text == "0.00" else text
