"""The planner's front door: a path in, a resolved spec or a plan out."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kpipe.codegen.diagnostics import Diagnostic, SpecError, did_you_mean
from kpipe.codegen.edits import replace_word
from kpipe.codegen.plan.build import build_plan, refuse_unbuilt
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.plan.resolve import Resolved, resolve
from kpipe.codegen.spec.load import find_geometry, load_source
from kpipe.codegen.spec.models import Geometry, Pipeline
from kpipe.codegen.spec.validate import validate


def resolve_spec(
    path: str, texts: dict[str, str], given: Mapping[str, str] = MappingProxyType({})
) -> Resolved:
    """Read, validate and resolve a spec.

    `texts` receives the text of every file read; `given` are texts that stand for files.  Raises
    SpecError with every error found.
    """
    source = load_source(path, texts, given)
    spec: Pipeline = validate(Pipeline, source)
    geometry_path, known = find_geometry(path, spec.geometry)
    if geometry_path is None:
        message = f"no geometry `{spec.geometry}`"
        span = source.span("geometry")
        near = did_you_mean(spec.geometry, known)
        hint = f"did you mean `{near}`?" if near else f"write geometry/{spec.geometry}.yaml"
        fix = replace_word(texts, span, spec.geometry, near) if near else ()
        raise SpecError((Diagnostic("KP103", message, span, allowed=known, help=hint, fix=fix),))
    geometry_source = load_source(_shown(path, geometry_path), texts, given)
    geometry: Geometry = validate(Geometry, geometry_source)
    report = Report(source)
    resolved = resolve(spec, geometry, source, geometry_source, report)
    report.stop_on_errors()
    return resolved


def plan_pipeline(path: str, texts: dict[str, str] | None = None) -> PipelinePlan:
    """The plan of a spec, for all its rows, query lengths and targets.

    Raises SpecError with every error found.
    """
    resolved = resolve_spec(path, {} if texts is None else texts)
    refuse_unbuilt(resolved)
    return build_plan(resolved, Report(resolved.source))


def _shown(path: str, geometry_path: object) -> str:
    """The geometry's path as a person would type it from where the spec was named."""
    import os

    shown = os.path.relpath(str(geometry_path))
    return str(geometry_path) if shown.startswith("../../..") else shown.replace(os.sep, "/")
