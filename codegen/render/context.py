"""What templates see: plain data, ready to be written down.  Templates choose and wire; every
computation stands here."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

from kpipe.codegen.ops.contract import Contract, Derive, Kind
from kpipe.codegen.plan.flags import active
from kpipe.codegen.plan.model import MAIN, Binding, Fork, Join, Launch, Method, PipelinePlan
from kpipe.codegen.render.source import (
    axis_source,
    commented,
    constant,
    laid_out,
    names_of,
    tuple_source,
)
from kpipe.codegen.render.timeline import timeline
from kpipe.codegen.spec.rows import format_rows

# What the oracle needs to know of a model.
_MODEL_DIMS = (
    "hidden",
    "heads_total",
    "q_lora",
    "kv_lora",
    "pe",
    "nope",
    "v_dim",
    "index_heads",
    "index_dim",
    "top_k",
)
_ROUNDS = ("kv_norm", "query_b", "absorb", "merged", "value")


def class_name(name: str) -> str:
    """dsa_tp -> DsaTpLayer."""
    return "".join(part.capitalize() for part in name.split("_")) + "Layer"


def kernel_class(template: str) -> str:
    """rms_norm -> RmsNorm."""
    return "".join(part.capitalize() for part in template.split("_"))


def common_context(plan: PipelinePlan) -> dict[str, Any]:
    """Context of every template."""
    return {
        "spec": shown_spec(plan),
        "name": plan.name,
        "doc": plan.doc.rstrip("."),
        "class_name": class_name(plan.name),
        "geometry": plan.geometry,
        "dims": dict(plan.dims),
        "scalars": dict(plan.scalars),
        "numerics": dict(plan.numerics),
        "parallel": dict(plan.parallel),
        "columns": {c: offset for b in plan.buffers for c, offset, _ in b.columns},
        "pages": {cache.name: cache.page for cache in plan.caches},
        "row_bytes": {cache.name: cache.row_bytes for cache in plan.caches},
        "formats": {cache.name: cache.format for cache in plan.caches},
        "rows_cap": plan.rows_cap,
        "targets": plan.targets,
        "status": plan.status,
    }


def shown_spec(plan: PipelinePlan) -> str:
    """The spec's path inside its project, so that output does not depend on the folder that the
    command ran in."""
    from pathlib import Path

    from kpipe.codegen.config import project_root

    path = Path(plan.path).resolve()
    return path.relative_to(project_root(path)).as_posix()


# -- memory.py ---------------------------------------------------------------------------------


def memory_context(plan: PipelinePlan) -> dict[str, Any]:
    """Declarations of weights, step tensors, caches, buffers and mailboxes."""
    texts = [
        *(axis for tensor in (*plan.weights, *plan.step) for axis in tensor.axes),
        *(axis for buffer in plan.buffers for axis in buffer.axes),
        *(axis for mailbox in plan.mailboxes for axis in mailbox.axes),
    ]
    used = {*names_of(texts), *(n for n in _MODEL_DIMS if n in plan.dims)} - {"rows_cap"}
    return {
        "constants": [(constant(n), plan.dims[n]) for n in plan.dims if n in used],
        "weights": [(t.name, _tensor(t.axes, t.dtype)) for t in plan.weights],
        "step": [(t.name, _tensor(t.axes, t.dtype)) for t in plan.step],
        "caches": [(c.name, f'CacheSpec("{c.format}", {c.page})') for c in plan.caches],
        "buffers": [(b.name, _buffer(b)) for b in plan.buffers],
        "mailboxes": [(m.name, _mailbox(m)) for m in plan.mailboxes],
        "model_name": plan.geometry if any(b.scope == "model" for b in plan.buffers) else "",
        "model": [n for n in _MODEL_DIMS if n in plan.dims],
        "context_parallel": plan.context_parallel,
    }


def _shape(axes: tuple[str, ...]) -> str:
    return tuple_source([axis_source(axis) for axis in axes])


def _tensor(axes: tuple[str, ...], dtype: str) -> str:
    return f'TensorSpec({_shape(axes)}, "{dtype}")'


def _buffer(buffer: Any) -> str:
    arguments = [_shape(buffer.axes), f'"{buffer.dtype}"']
    if buffer.scope != "kind":
        arguments.append(f'scope="{buffer.scope}"')
    if buffer.columns:
        inner = "".join(
            f'                "{name}": ({offset}, {width}),\n'
            for name, offset, width in buffer.columns
        )
        arguments.append("columns={\n" + inner + "            }")
    if buffer.zeroed:
        arguments.append("zeroed=True")
    if buffer.columns:
        body = "".join(f"            {argument},\n" for argument in arguments)
        return f"BufferSpec(\n{body}        )"
    return f"BufferSpec({', '.join(arguments)})"


def _mailbox(mailbox: Any) -> str:
    arguments = [
        f'"{mailbox.name}"',
        _shape(mailbox.axes),
        f'DTYPES["{mailbox.dtype}"]',
        f"0x{mailbox.sentinel:08X}",
        f"parities={mailbox.parities}",
        f"source_axis={mailbox.source_axis}",
        f"source_stride={mailbox.source_stride}",
    ]
    body = "".join(f"            {argument},\n" for argument in arguments)
    return f"MailboxSpec(\n{body}        )"


# -- ops.py ------------------------------------------------------------------------------------


def ops_context(plan: PipelinePlan) -> dict[str, Any]:
    """Declarations of every op of every declared mode, in order of name."""
    constants: dict[str, object] = {}
    entries = [_op(plan, contract, constants) for contract in plan.ops]
    modules = sorted({contract.reference.partition(":")[0] for contract in plan.ops})
    rounds = [(name, plan.numerics[f"round_{name}"]) for name in _ROUNDS]
    return {
        "ops": entries,
        "constants": sorted(constants.items()),
        "modules": modules,
        "uses_rounds": any("rounds" in contract.constants for contract in plan.ops),
        "rounds": rounds,
    }


def _op(plan: PipelinePlan, contract: Contract, constants: dict[str, object]) -> str:
    module, _, function = contract.reference.partition(":")
    flags = plan.settled[contract.name]
    weights = [
        f'"{o.name}"' for o in contract.operands if o.kind is Kind.WEIGHT and active(o, flags)
    ]
    lines = [
        f'name="{contract.name}"',
        f'stage="{plan.stages[contract.name]}"',
        f"reference={module}.{function}",
    ]
    if weights:
        lines.append(
            laid_out("weights=", weights, "", 8).strip()
            if len(weights) > 1
            else f"weights=({weights[0]},)"
        )
    bound = _op_constants(plan, contract, constants)
    if bound:
        pairs = ", ".join(f'"{name}": {value}' for name, value in bound)
        if len(pairs) > 70:
            inner = "".join(f'            "{name}": {value},\n' for name, value in bound)
            lines.append("constants={\n" + inner + "        }")
        else:
            lines.append(f"constants={{{pairs}}}")
    if "shard" in contract.constants:
        lines.append("needs_shard=True")
    kernel = plan.kernel(contract)
    if kernel:
        lines.append(f'kernel="{kernel}:{kernel_class(kernel)}"')
    if contract.source != "kpipe":
        lines.append(f'source="{contract.source}"')
    tactics = _tactics(plan, contract.name)
    if kernel and tactics:
        inner = "".join(f"            {entry},\n" for entry in tactics)
        lines.append("tactics={\n" + inner + "        }")
    body = "".join(f"        {line},\n" for line in lines)
    return f"    Op(\n{body}    ),\n"


def _tactics(plan: PipelinePlan, op: str) -> list[str]:
    """`("sm_90a", 8): {"tile_n": 64}`: tile parameters up to that many rows, by arch."""
    entries = []
    for arch, most, tactic in plan.tactics[op]:
        fields = ", ".join(f'"{name}": {value}' for name, value in tactic)
        entries.append(f'("{arch}", {most}): {{{fields}}}')
    return entries


def _op_constants(
    plan: PipelinePlan, contract: Contract, constants: dict[str, object]
) -> list[tuple[str, str]]:
    bound: list[tuple[str, str]] = []
    when = contract.constants_when
    takes = not when or plan.settled[contract.name][when]
    for name in contract.constants if takes else ():
        if name == "shard" or (name == "lse_base" and not contract.lse_base):
            continue  # bound by prepare(), or passed by the call
        if name == "lse_base":
            bound.append((name, f'"{contract.lse_base}"'))
        elif name == "rounds":
            bound.append((name, "ROUNDS"))
        elif name == "gate_columns":
            if found := _columns(plan, "gate"):
                constants["GATE_COLUMNS"] = found
                bound.append((name, "GATE_COLUMNS"))
        elif name in ("sigmoid", "index_quant", "round_mix"):
            bound.append((name, f'"{plan.numerics[name]}"'))
        else:
            constants[constant(name)] = plan.scalars.get(name, plan.dims.get(name))
            bound.append((name, constant(name)))
    for flag in contract.flags:
        if flag.derive is Derive.CONTEXT_PARALLEL and plan.context_parallel:
            bound.append((flag.name, "True"))
    told = {flag.operand for flag in contract.flags if flag.derive is Derive.OPTION}
    for option in contract.options:
        if not option.table and option.name not in told:
            bound.append((option.name, f'"{_option(plan, contract, option.name)}"'))
    return bound


def _columns(plan: PipelinePlan, name: str) -> tuple[int, int] | None:
    """Where the column of that name begins and ends in its buffer; None where none has it."""
    found = (c for buffer in plan.buffers for c in buffer.columns if c[0] == name)
    return next(((offset, offset + width) for _, offset, width in found), None)


def _option(plan: PipelinePlan, contract: Contract, name: str) -> str:
    for step in plan.plans:
        for launch in step.launches:
            if launch.op == contract.name:
                return dict(launch.options)[name]
    return next(o.choices[0] for o in contract.options if o.name == name)


# -- layer.py ----------------------------------------------------------------------------------


def layer_context(plan: PipelinePlan) -> dict[str, Any]:
    """The class: its total table and its methods."""
    return {
        "table": _table(plan),
        "printed_table": table_lines(plan),
        "methods": [_method(plan, method) for method in plan.methods],
        "streams": plan.streams,
        "fallbacks": plan.fallbacks,
        "ranks": plan.parallel["tp"],
        "interleave": plan.parallel["interleave"],
        "context_parallel": plan.context_parallel,
        "uses_torch": False,
    }


def _table(plan: PipelinePlan) -> list[tuple[str, list[str]]]:
    by_key: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for method in plan.methods:
        for arch, q, rows in method.uses:
            by_key.setdefault((arch, q), []).extend((row, method.name) for row in rows)
    ordered = [(arch, q) for arch in plan.targets for q, _ in plan.rows]
    return [
        (f'("{arch}", {q})', [f'{row}: "{name}"' for row, name in sorted(by_key[(arch, q)])])
        for arch, q in ordered
    ]


def table_lines(plan: PipelinePlan) -> list[str]:
    """The table as aligned text, one line per arch, q and method."""
    lines = [("arch", "q", "rows", "method")]
    for arch in plan.targets:
        for q, _ in plan.rows:
            found = [
                (rows, method.name)
                for method in plan.methods
                for a, query, rows in method.uses
                if (a, query) == (arch, q)
            ]
            lines += [(arch, str(q), format_rows(rows), name) for rows, name in sorted(found)]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    return [
        f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {d}".rstrip()
        for a, b, c, d in lines
    ]


def _method(plan: PipelinePlan, method: Method) -> dict[str, Any]:
    streams = [stream for stream in method.plan.streams if stream != MAIN]
    return {
        "name": method.name,
        "rows": uses_text(method),
        "timeline": timeline(method.plan),
        "streams": streams,
        "body": "\n".join(_body(plan, method)),
    }


def uses_text(method: Method) -> str:
    """`Rows 1-4 (q 1) and 4, 8 (q 4) on sm_90a`."""
    by_arch: dict[str, list[str]] = {}
    for arch, q, rows in method.uses:
        by_arch.setdefault(arch, []).append(f"{format_rows(rows)} (q {q})")
    return "; ".join(f"rows {' and '.join(uses)} on {arch}" for arch, uses in by_arch.items())


def _body(plan: PipelinePlan, method: Method) -> list[str]:
    lines: list[str] = []
    stream, last_file = MAIN, ""
    for item in method.plan.items:
        if isinstance(item, Fork):
            stream = MAIN
            lines.append(f"        {item.stream}.wait_stream({item.origin})")
        elif isinstance(item, Join):
            stream = MAIN
            readers = _first_reader(method, item)
            comment = f"{readers} needs what {item.stream} made" if readers else ""
            lines.append(commented(f"        {item.target}.wait_stream({item.stream})", comment))
        else:
            if item.stream != stream and item.stream != MAIN:
                lines.append(f"        with self.on({item.stream}):")
            stream = item.stream
            file = PurePosixPath(item.span.path).name
            place = f"{file if file != last_file else ''}:{item.span.line}"
            last_file = file
            lines.append(_call(plan, item, place, 8 if stream == MAIN else 12))
    return lines


def _first_reader(method: Method, join: Join) -> str:
    """The first op behind a join that reads something written on the joined stream."""
    items = method.plan.items
    written = {
        b.target
        for item in items
        if isinstance(item, Launch) and item.stream == join.stream
        for b in item.bindings
        if b.access.writes
    }
    for item in items[items.index(join) :]:
        if isinstance(item, Launch) and any(
            b.access.reads and b.target in written for b in item.bindings
        ):
            return item.name
    return ""


def _call(plan: PipelinePlan, launch: Launch, place: str, indent: int) -> str:
    arguments = [_argument(plan, b) for b in launch.bindings if _passed(b) and not b.conditional]
    arguments += [
        f"{b.operand}={_argument(plan, b)}" for b in launch.bindings if _passed(b) and b.conditional
    ]
    if launch.contract.takes_rows:
        arguments.append("rows=at.rows")
    constant_flags = {f.name for f in launch.contract.flags if f.derive is Derive.CONTEXT_PARALLEL}
    arguments += [f"{name}=True" for name, on in launch.flags if on and name not in constant_flags]
    arguments += [f'{name}="{value}"' for name, value in launch.arguments]
    reasons = []
    if not launch.pdl.attribute:
        arguments.append("pdl=False")
        reasons.append(launch.pdl.attribute_reason)
    if not launch.pdl.release and not launch.contract.release.fixed:
        arguments.append("release=False")
        reasons.append(launch.pdl.release_reason)
    comment = " ".join([place, "; ".join(dict.fromkeys(reasons))]).strip()
    return commented(laid_out(f"self.{launch.name}", arguments, "", indent), comment)


def _passed(binding: Binding) -> bool:
    return binding.kind is not Kind.WEIGHT


def _argument(plan: PipelinePlan, binding: Binding) -> str:
    if binding.kind is Kind.STEP:
        return f"step.{binding.target}"
    if binding.kind is Kind.CACHE:
        return f"self.{binding.target}"
    assert re.fullmatch(r"[a-z][a-z0-9_]*", binding.target)
    return f"at.{binding.target}"
