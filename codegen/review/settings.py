"""Everything that a plan declares, one line a thing; what differs is a changed declaration."""

from __future__ import annotations

from collections.abc import Iterator

from kpipe.codegen.ops.contract import Contract
from kpipe.codegen.plan.describe import row_list
from kpipe.codegen.plan.model import MAIN, PipelinePlan
from kpipe.codegen.plan.modes import Mode
from kpipe.codegen.review.model import Memory, Setting
from kpipe.codegen.review.side import Side


def setting_changes(old: Side, new: Side) -> tuple[Setting, ...]:
    """Declarations that differ, in order of the plan; both sides have a plan."""
    before, after = dict(_declared(old)), dict(_declared(new))
    return tuple(
        Setting(*key, before.get(key, ""), after.get(key, ""))
        for key in dict.fromkeys((*before, *after))
        if before.get(key, "") != after.get(key, "")
    )


def memory_of(plan: PipelinePlan) -> Memory:
    """What prepare() sets aside on one rank."""
    from kpipe.codegen.plan.workspace import workspaces

    private: dict[tuple[str, str], int] = {}
    for step in plan.plans:
        for one in workspaces(plan, step):
            key = (one.op, one.name)
            private[key] = max(private.get(key, 0), one.bytes)
    return Memory(
        sum(buffer.bytes for buffer in plan.buffers),
        sum(mailbox.bytes for mailbox in plan.mailboxes),
        sum(private.values()),
    )


def _declared(side: Side) -> Iterator[tuple[tuple[str, str], str]]:
    plan = side.pipeline
    assert plan is not None
    yield ("pipeline", "geometry"), plan.geometry
    for name, value in plan.environment.items():
        yield ("environment", name), str(value)
    for name, number in plan.parallel.items():
        yield ("parallel", name), "-" if number is None else str(number)
    yield ("pipeline", "targets"), ", ".join(plan.targets)
    for q, counts in plan.rows:
        yield ("rows", f"q {q}"), row_list(counts)
    yield from _memory(plan)
    for stream, priority in plan.streams:
        yield ("stream", stream), f"priority {priority}"
    for mode in side.modes.values():
        yield ("mode", mode.name), _mode(mode)
    for name, other, reason in plan.fallbacks:
        yield ("fallback", name), f"{other}: {reason}"
    for op in plan.ops:
        yield ("op", op.name), _contract(plan, op)
    for name, size in plan.dims.items():
        yield ("dimension", name), str(size)


def _memory(plan: PipelinePlan) -> Iterator[tuple[tuple[str, str], str]]:
    for buffer in plan.buffers:
        zeroed = ", zeroed once" if buffer.zeroed else ""
        columns = "".join(f", {name} {at}+{width}" for name, at, width in buffer.columns)
        text = f"{_shape(buffer.shape)} {buffer.dtype}, scope {buffer.scope}{zeroed}{columns}"
        yield ("buffer", buffer.name), text
    for box in plan.mailboxes:
        yield (
            ("mailbox", box.name),
            f"{_shape(box.shape)} {box.dtype}, {box.parities} parities, sentinel "
            f"0x{box.sentinel:08X}, re-armed by {box.rearmed_by}",
        )
    for cache in plan.caches:
        extra = f", manager page {cache.manager_page}" if cache.manager_page else ""
        extra += f", at most {cache.max_blocks} blocks" if cache.max_blocks else ""
        text = f"{cache.format}, page {cache.page}, {cache.row_bytes} bytes a token{extra}"
        yield ("cache", cache.name), text
    for tensor in plan.weights:
        yield ("weight", tensor.name), f"{_shape(tensor.shape)} {tensor.dtype}"
    for tensor in plan.step:
        written = ", written" if tensor.written else ""
        yield ("step input", tensor.name), f"{_shape(tensor.shape)} {tensor.dtype}{written}"


def _shape(shape: tuple[int | str, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _mode(mode: Mode) -> str:
    """`main: a, fork side, b, join side; side: c`, and what it requires."""
    lists: dict[str, list[str]] = {MAIN: []}
    for word in mode.words:
        text = word.name if word.verb == "launch" else f"{word.verb} {word.name}"
        lists.setdefault(word.stream, []).append(text)
    text = "; ".join(f"{stream}: {', '.join(words)}" for stream, words in lists.items())
    needs = ", ".join(f"{fact} {str(value).lower()}" for fact, value in mode.requires)
    return f"{text}; requires {needs}" if needs else text


def _contract(plan: PipelinePlan, op: Contract) -> str:
    """The contract of an op in one line: whose it is, where it waits and releases, its limits."""
    kernel = plan.kernel(op)
    whose = f"library {op.source}" if op.source != "kpipe" else "kernel of ours"
    if op.source == "kpipe":
        whose = f"kernel {kernel}" if kernel else "no kernel yet"
    words = [whose, "waits" if op.waits else "never waits", f"release {op.release.value}"]
    if op.early_reads:
        words.append(f"reads {', '.join(op.early_reads)} before its wait")
    if op.lse_base:
        words.append(f"LSE base {op.lse_base}")
    if op.empty_row:
        words.append(f"rows without keys: {op.empty_row}")
    if op.limits.archs:
        words.append(f"on {', '.join(op.limits.archs)}")
    return ", ".join(words)
