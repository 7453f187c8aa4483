"""A pipeline's plan as a whole: every step's plan, the memory they need, the ops they may use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kpipe.codegen.ops.contract import Contract, Derive, Kind, Option
from kpipe.codegen.plan.bind import collect_tensors
from kpipe.codegen.plan.methods import name_methods
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved
from kpipe.codegen.plan.tactics import tactics_of
from kpipe.codegen.spec.document import Scalar


def check_used(resolved: Resolved, plans: list[StepPlan], report: Report) -> None:
    """Declared memory that no op of any declared mode binds is a mistake."""
    bound: set[str] = set()
    for op, slot in inventory(resolved).items():
        stage = resolved.spec.stages[slot]
        for operand in resolved.contracts[op].operands:
            bound.add(
                stage.bind.get(f"{op}.{operand.name}")
                or stage.bind.get(operand.name)
                or operand.name
            )
    columns = {c: b.name for b in resolved.buffers for c, _, _ in b.columns}
    bound |= {columns[name] for name in bound if name in columns}
    for section in ("buffers", "mailboxes", "caches"):
        for name in getattr(resolved.spec, section):
            if name not in bound:
                report.error(
                    "KP109",
                    f"no op reads or writes `{name}`",
                    report.source.span(section, name, key=True),
                    help="delete it, or bind an operand to it",
                )
    for stage_name, stage in resolved.spec.stages.items():
        ops = {op for op, owner in inventory(resolved).items() if owner == stage_name}
        operands = {o.name for op in ops for o in resolved.contracts[op].operands}
        for key in stage.bind:
            op, _, operand = key.rpartition(".")
            known = {o.name for o in resolved.contracts[op].operands} if op in ops else operands
            if (op and op not in ops) or operand not in known:
                span = report.source.span("stages", stage_name, "with", key, key=True)
                report.unknown(f"operand of stage `{stage_name}`:", key, span, sorted(operands))
        for op in stage.pdl:
            if op not in ops:
                span = report.source.span("stages", stage_name, "pdl", op, key=True)
                report.unknown(f"op of stage `{stage_name}`:", op, span, sorted(ops))


def inventory(resolved: Resolved) -> dict[str, str]:
    """Every op that any declared mode may launch -> its stage, whatever the table selects."""
    found: dict[str, str] = {}
    for mode in resolved.modes.values():
        for word in mode.ops:
            slot = resolved.slots.get(word)
            for op in slot.choices if slot else ():
                if op in resolved.contracts:
                    found.setdefault(op, slot.stage)
    return dict(sorted(found.items()))


def assemble(
    resolved: Resolved,
    plans: tuple[StepPlan, ...],
    fallbacks: tuple[tuple[str, str, str], ...],
    report: Report,
) -> PipelinePlan:
    spec, dims = resolved.spec, resolved.dims
    ops = tuple(resolved.contracts[name] for name in inventory(resolved))
    settled = {op.name: settled_flags(resolved, op) for op in ops}
    softmax_dim = dims_value(str(resolved.geometry.scalars.softmax_dim), dims)
    scalars = resolved.geometry.scalars
    return PipelinePlan(
        name=spec.name,
        doc=spec.doc,
        path=resolved.source.path,
        geometry=spec.geometry,
        dims=MappingProxyType(dict(dims)),
        scalars=MappingProxyType(
            {
                "rms_eps": scalars.rms_eps,
                "index_eps": scalars.index_eps,
                "softmax_scale": softmax_dim**-0.5 * scalars.softmax_mscale**2,
            }
        ),
        numerics=_numerics(resolved),
        parallel=MappingProxyType(dict(spec.parallel)),
        targets=resolved.targets,
        rows=tuple(resolved.rows.items()),
        buffers=resolved.buffers,
        mailboxes=resolved.mailboxes,
        caches=resolved.caches,
        weights=collect_tensors(ops, Kind.WEIGHT, resolved.memory, settled, report),
        step=collect_tensors(ops, Kind.STEP, resolved.memory, settled, report),
        ops=ops,
        stages=MappingProxyType(inventory(resolved)),
        settled=MappingProxyType(settled),
        tactics=MappingProxyType(
            {
                op.name: tactics_of(
                    op, resolved.slots.values(), resolved.targets, resolved.rows, dims
                )
                for op in ops
            }
        ),
        plans=plans,
        methods=name_methods(plans),
        modes=tuple(resolved.modes),
        fallbacks=fallbacks,
        environment=MappingProxyType(dict(spec.environment)),
        streams=_streams(resolved, plans),
    )


def _numerics(resolved: Resolved) -> Mapping[str, str]:
    numerics = resolved.spec.numerics
    return MappingProxyType(
        {
            **{f"round_{k}": v for k, v in numerics.round},
            "sigmoid": numerics.sigmoid,
            "index_quant": numerics.index_quant,
        }
    )


def settled_flags(resolved: Resolved, contract: Contract) -> dict[str, bool]:
    """Flags of an op that are the same in every mode and for all rows."""
    options = {option.name: option for option in contract.options if not option.table}
    flags = {"dcp": resolved.context_parallel}
    for flag in contract.flags:
        if flag.derive is Derive.OPTION and flag.operand in options:
            value = _settled_option(resolved, contract.name, options[flag.operand])
            flags[flag.name] = value == flag.name
    return flags


def _settled_option(resolved: Resolved, op: str, option: Option) -> str:
    """The word that a spec gives an option that may not vary by rows."""
    for slot in resolved.slots.values():
        if op in slot.choices and option.name in slot.options:
            node = next(iter(slot.options[option.name].values())).value
            return node.raw if isinstance(node, Scalar) else option.choices[0]
    return option.choices[0]


def dims_value(text: str, dims: Mapping[str, int]) -> int:
    """A shape expression over plain dimensions."""
    from kpipe.codegen.spec.expressions import evaluate, parse

    return evaluate(parse(text), dims)


def _streams(resolved: Resolved, plans: tuple[StepPlan, ...]) -> tuple[tuple[str, int], ...]:
    names = dict.fromkeys(s for plan in plans for s in plan.streams if s != "main")
    declared = resolved.spec.streams
    return tuple((name, declared[name].priority if name in declared else 0) for name in names)
