"""Names of a spec that would meet in the generated class: each must be free and used once.

The class keeps ops, caches and streams as attributes, methods under the names of modes, and
hands buffers, columns and mailboxes to a method in one namespace.
"""

from __future__ import annotations

from collections.abc import Mapping

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.plan.model import MAIN
from kpipe.codegen.plan.modes import Mode
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.models import Pipeline

# What the base class of a generated layer calls its own, without a leading underscore, and the
# local names of a generated method.
LAYER_WORDS = frozenset(
    (
        *(
            "arch",
            "backend",
            "bind_caches",
            "bind_memory",
            "bound",
            "buffers",
            "check_storage",
        ),
        *(
            "calls",
            "checked_weights",
            "comm",
            "declared_rows",
            "declared_rows_of",
            "enter",
            "entered",
        ),
        *(
            "finish",
            "mailboxes",
            "main",
            "on",
            "padded",
            "prepare",
            "prepare_cuda",
            "refuse_missing_kernels",
        ),
        *("remaining", "run", "sequence", "shard", "stop_after", "views", "weights"),
        *("current_stream", "device", "owns", "sized", "step_check"),
        *("at", "self", "step"),
    )
)


def check_names(spec: Pipeline, modes: Mapping[str, Mode], report: Report) -> None:
    """Report names that are used twice or that the generated class needs itself."""
    _check_memory(spec, report)
    for cache in spec.caches:
        place = report.source.span("caches", cache, key=True)
        _check_attribute("cache", cache, place, report)
    for name, mode in modes.items():
        if name in LAYER_WORDS:
            message = f"mode `{name}`: the generated class has a method of that name already"
            report.error("KP103", message, mode.span, help="choose another name")
        for word in mode.words:
            if word.verb == "fork":
                _check_attribute("stream", word.name, word.span, report, once=True)
    _check_streams(spec, modes, report)


def _check_attribute(
    what: str, name: str, span: Span, report: Report, *, once: bool = False
) -> None:
    if name in LAYER_WORDS or name in CONTRACTS:
        owner = "an op" if name in CONTRACTS else "a word of the generated class"
        message = f"`{name}` cannot be the name of a {what}: it is {owner}"
        report.error("KP103", message, span, help="choose another name", once=once)


def _check_memory(spec: Pipeline, report: Report) -> None:
    owners: dict[str, tuple[str, Span]] = {}

    def own(name: str, what: str, span: Span) -> None:
        if name in owners:
            first, place = owners[name]
            message = f"`{name}` is declared twice: as {first} and as {what}"
            help = "give one of the two another name"
            report.error("KP103", message, span, help=help, related=[("first", place)])
        owners.setdefault(name, (what, span))

    for name, buffer in spec.buffers.items():
        own(name, "a buffer", report.source.span("buffers", name, key=True))
        for column in buffer.columns:
            place = report.source.span("buffers", name, "columns", column, key=True)
            own(column, f"a column of `{name}`", place)
    for name in spec.mailboxes:
        own(name, "a mailbox", report.source.span("mailboxes", name, key=True))


def _check_streams(spec: Pipeline, modes: Mapping[str, Mode], report: Report) -> None:
    forked = {w.name for mode in modes.values() for w in mode.words if w.verb == "fork"}
    for name in spec.streams:
        if name not in forked:
            why = "the engine owns the stream of the step" if name == MAIN else "no mode forks it"
            report.error(
                "KP109",
                f"`streams.{name}` has no effect: {why}",
                report.source.span("streams", name, key=True),
                allowed=sorted(forked),
                help="delete it, or fork the stream in a mode",
            )
