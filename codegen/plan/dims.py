"""Dimensions: the geometry's expressions with this spec's parallelism filled in."""

from __future__ import annotations

from collections.abc import Mapping

from kpipe.codegen.diagnostics import Span, subspan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.expressions import ExpressionError, evaluate, names_in, parse
from kpipe.codegen.spec.load import Source
from kpipe.codegen.spec.models import Geometry, Pipeline

# Sizes that are only known when a step runs.  Expressions over them are compared by giving
# each a prime that no product of real dimensions meets by accident.
SYMBOLS: Mapping[str, int] = {
    "rows": 1_000_003,
    "requests": 1_000_033,
    "pages": 1_000_037,
    "index_pages": 1_000_039,
    "blocks": 1_000_081,
}
# Words of shape expressions, and names that the generated modules use themselves.
_RESERVED = frozenset(
    (
        *SYMBOLS,
        *("tp", "dcp", "interleave", "rows_cap", "splits", "core_heads"),
        *("dtypes", "memory", "ops", "rounds"),
    )
)


def resolve_dims(
    spec: Pipeline, geometry: Geometry, geometry_source: Source, report: Report
) -> dict[str, int]:
    """Every dimension as a number, parallelism included; errors go to the report."""
    parallel = spec.parallel
    values: dict[str, int] = {
        "tp": parallel.tp,
        "dcp": parallel.dcp or 1,
        "interleave": parallel.interleave,
    }
    texts = {name: str(text) for name, text in geometry.dims.items()}
    failed: set[str] = set()

    def value_of(name: str, trail: tuple[str, ...]) -> int | None:
        if name in values:
            return values[name]
        if name in failed or name not in texts:
            return None
        span = geometry_source.span("dims", name)
        if name in trail:
            circle = " -> ".join([*trail[trail.index(name) :], name])
            message = f"dimension goes in a circle: {circle}"
            report.error("KP111", message, span, help="write one of them as a number")
            failed.add(name)
            return None
        try:
            expression = parse(texts[name])
            known = set(names_in(expression))
            for needed in sorted(known):
                value_of(needed, (*trail, name))
            if known & failed:
                failed.add(name)
                return None
            values[name] = evaluate(expression, values, positive=True)
        except ExpressionError as error:
            failed.add(name)
            _expression_error(report, name, texts[name], error, span)
            return None
        return values[name]

    for name in texts:
        if name in _RESERVED:
            where = geometry_source.span("dims", name, key=True)
            message = f"`{name}` is a word of the language, not a dimension"
            report.error("KP111", message, where, help="choose another name")
            continue
        value_of(name, ())
    return values


def _expression_error(
    report: Report, name: str, text: str, error: ExpressionError, span: Span
) -> None:
    """Blame the parallelism where the model's own numbers are fine without it."""
    blamed = report.source.span("parallel", "tp")
    if "tp" in text and "multiple" in str(error):
        report.error(
            "KP111",
            f"`{name}` does not come out even: {error.message}",
            blamed,
            help="choose a tp that divides it",
            related=[("dimension", span)],
        )
        return
    place = subspan(span, text, error.offset, error.length)
    report.error("KP111", f"dimension `{name}`: {error.message}", place, help=_repair(error))


def check_softmax(
    geometry: Geometry, source: Source, dims: Mapping[str, int], report: Report
) -> None:
    """The softmax scale is a root of `softmax_dim`, so that must be a positive dimension."""
    span = source.span("scalars", "softmax_dim")
    text = geometry.scalars.softmax_dim
    if set(geometry.dims) - set(dims) and report.found:
        return  # a dimension that it may be made of is refused already
    shape_value(text, dims, report, span, "`scalars.softmax_dim`", extra={})


def shape_value(
    text: str | int,
    names: Mapping[str, int],
    report: Report,
    span: Span,
    what: str,
    *,
    extra: Mapping[str, int] = SYMBOLS,
) -> int | None:
    """One axis of a shape as a number (symbols as primes); None and a finding on error."""
    try:
        return evaluate(parse(str(text)), {**names, **extra}, positive=True)
    except ExpressionError as error:
        place = subspan(span, str(text), error.offset, error.length)
        report.error("KP111", f"{what}: {error.message}", place, help=_repair(error))
        return None


def _repair(error: ExpressionError) -> str:
    if "not positive" in error.message:
        return "a size is at least 1"
    if "unknown name" in error.message and "did you mean" not in error.message:
        return "name a dimension of the geometry, or write a number"
    return ""
