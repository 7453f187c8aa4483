"""An op against its limits: architecture, heads, pages, formats, query lengths, parallelism."""

from __future__ import annotations

from collections.abc import Mapping

from kpipe.codegen.diagnostics import Span
from kpipe.codegen.ops.contract import Access, Contract, Kind
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.expressions import evaluate, names_in, parse
from kpipe.codegen.spec.models import Cache, Pipeline


def check_limits(
    contract: Contract,
    spec: Pipeline,
    dims: Mapping[str, int],
    arch: str,
    queries: tuple[int, ...],
    rows: int,
    span: Span,
    report: Report,
) -> bool:
    """Report every limit that this use of the op breaks.

    False where the op belongs to the other kind of parallelism: nothing else about it would be
    worth saying.
    """
    if not _check_parallelism(contract, spec.parallel.dcp is not None, span, report):
        return False
    limits, name = contract.limits, contract.name
    if limits.archs and arch not in limits.archs:
        report.error(
            "KP104",
            f"`{name}` does not run on {arch}",
            span,
            allowed=limits.archs,
            help="choose another op for this target in `variants`",
            once=True,
        )
    _check_sizes(contract, spec, dims, queries, rows, span, report)
    _check_rounding(contract, spec, span, report)
    for operand in contract.operands:
        if operand.kind is Kind.CACHE and operand.access is not Access.LAYOUT:
            cache = spec.caches.get(operand.name)
            if cache is not None:
                _check_cache(contract, operand.name, cache, span, report)
    return True


def _check_parallelism(
    contract: Contract, context_parallel: bool, span: Span, report: Report
) -> bool:
    limits, name = contract.limits, contract.name
    if context_parallel and not limits.dcp:
        report.error(
            "KP104",
            f"`{name}` needs whole contexts, but `parallel.dcp` is given",
            span,
            help="leave out `dcp`, or use the op that works on shards",
            once=True,
        )
        return False
    if not context_parallel and not limits.tp:
        report.error(
            "KP104",
            f"`{name}` exchanges data between context-parallel ranks, but `parallel.dcp` is not "
            "given",
            span,
            help="set `parallel.dcp`, or leave the op out",
            once=True,
        )
        return False
    return True


def _check_sizes(
    contract: Contract,
    spec: Pipeline,
    dims: Mapping[str, int],
    queries: tuple[int, ...],
    rows: int,
    span: Span,
    report: Report,
) -> None:
    limits, name = contract.limits, contract.name
    for q in queries:
        if limits.queries and q not in limits.queries:
            report.error(
                "KP104",
                f"`{name}` does not take q {q} (query rows per request)",
                span,
                allowed=tuple(str(query) for query in limits.queries),
                help="choose another op, or change `rows.queries`",
                once=True,
            )
    if limits.max_rows and rows > limits.max_rows:
        report.error(
            "KP104",
            f"`{name}` takes up to {limits.max_rows} rows; this entry has {rows}",
            span,
            help="choose another op for these rows in `variants`",
        )
    for text, divisor in limits.divides:
        expression = parse(text)
        if not names_in(expression) <= dims.keys():
            continue  # reported where the operand's shape names it
        if evaluate(expression, dims) % divisor:
            report.error(
                "KP104",
                f"`{name}` needs `{text}` to be a multiple of {divisor}; it is "
                f"{evaluate(expression, dims)}",
                span,
                help=f"choose another op, or a geometry whose {text} is a multiple of {divisor}",
                once=True,
            )
    if limits.interleaves and spec.parallel.interleave not in limits.interleaves:
        report.error(
            "KP104",
            f"`{name}` does not take interleave {spec.parallel.interleave}",
            span,
            allowed=tuple(str(value) for value in limits.interleaves),
            help="choose another op, or change `parallel.interleave`",
            once=True,
        )


def _check_rounding(contract: Contract, spec: Pipeline, span: Span, report: Report) -> None:
    """What an op sends is rounded to what a mailbox carries, whatever else the spec says of it."""
    for point in contract.limits.sent:
        if getattr(spec.numerics.round, point) != "bf16":
            report.error(
                "KP104",
                f"`{contract.name}` sends what is rounded at `{point}`, so it is bf16; the spec "
                "keeps fp32",
                report.source.span("numerics", "round", point),
                allowed=("bf16",),
                help=f"write `{point}: bf16`, or choose another op",
                related=[("the op", span)],
                once=True,
            )


def _check_cache(
    contract: Contract, cache_name: str, cache: Cache, span: Span, report: Report
) -> None:
    limits = contract.limits
    if limits.cache_formats and cache.format not in limits.cache_formats:
        report.error(
            "KP104",
            f"`{contract.name}` cannot use cache format {cache.format} of `{cache_name}`",
            span,
            allowed=limits.cache_formats,
            help="choose another op, or change the cache's format",
            related=[("cache", report.source.span("caches", cache_name, "format"))],
            once=True,
        )
    if limits.pages and cache.page not in limits.pages:
        report.error(
            "KP104",
            f"`{contract.name}` cannot use pages of {cache.page} tokens of `{cache_name}`",
            span,
            allowed=tuple(str(page) for page in limits.pages),
            help="choose another op, or change the cache's page",
            related=[("cache", report.source.span("caches", cache_name))],
            once=True,
        )


def head_rows(
    contract: Contract, dims: Mapping[str, int], context_parallel: bool, span: Span, report: Report
) -> int:
    """Head rows that one launch of a core runs, padding included; 0 for other ops."""
    limits = contract.limits
    if not limits.heads:
        return 0
    heads = dims["heads"] * (dims["tp"] if context_parallel else 1)
    if any(first <= heads <= last for first, last in limits.heads):
        return heads
    padded = next((pad for pad in limits.head_pad if pad >= heads), None)
    if padded is not None:
        return padded
    ranges = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in limits.heads)
    report.error(
        "KP104",
        f"`{contract.name}` takes {ranges} head rows; this layer has {heads}",
        span,
        help="choose another core in `variants`, or another tp",
        once=True,
    )
    return heads
