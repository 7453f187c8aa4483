"""A throw-away project with a copy of the shipped pipelines, and edits to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import kpipe.codegen.plan.api as plan_api
from kpipe.codegen.diagnostics import Diagnostic, SpecError
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.proof.api import prove_pipeline
from kpipe.codegen.proof.proved import ProvedPlan
from kpipe.codegen.render.api import render_pipeline

SHIPPED = Path(plan_api.__file__).resolve().parents[2] / "pipelines"
UNTUNED = Path(__file__).parent / "specs"
"""Stand in for shipped specs whose tables `kpipe tune` writes, so that edits find their text."""
PIPELINES = ("dsa_tp", "dsa_dcp", "dsa_dcp_d2", "dsa_tp_ds", "dsa_tp_flashmla")
GEOMETRIES = ("kimi_k31", "small")

Edit = tuple[str, str, str]  # file below pipelines/, text that occurs once, its replacement


def source_of(name: str) -> Path:
    """The file that a project's copy of `name` comes from."""
    return UNTUNED / name if (UNTUNED / name).exists() else SHIPPED / name


def make_project(root: Path, edits: Iterable[Edit] = ()) -> Path:
    """Copy the shipped specs, as before they were tuned, to `root`/pipelines and edit them.

    Returns `root`.
    """
    (root / "pipelines" / "geometry").mkdir(parents=True, exist_ok=True)
    (root / "pyproject.toml").write_text("")
    for name in PIPELINES:
        shutil.copy(source_of(f"{name}.yaml"), root / "pipelines")
    for name in GEOMETRIES:
        shutil.copy(SHIPPED / "geometry" / f"{name}.yaml", root / "pipelines" / "geometry")
    for file, old, new in edits:
        edit(root, file, old, new)
    return root


def edit(root: Path, file: str, old: str, new: str) -> None:
    """Replace the only occurrence of `old`."""
    path = root / "pipelines" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{text.count(old)} times in {file}: {old}"
    path.write_text(text.replace(old, new))


def plan_of(root: Path, name: str = "dsa_tp") -> PipelinePlan:
    """The plan of a spec of the project."""
    return prove_pipeline(str(root / "pipelines" / f"{name}.yaml")).pipeline


def plan_edited(root: Path, name: str, *edits: tuple[str, str]) -> PipelinePlan:
    """The plan of a shipped spec after edits to its own file."""
    make_project(root, [(f"{name}.yaml", old, new) for old, new in edits])
    return plan_of(root, name)


def findings_of(path: str, texts: dict[str, str] | None = None) -> tuple[Diagnostic, ...]:
    """What is wrong with a spec; empty where it plans."""
    try:
        prove_pipeline(path, texts)
    except SpecError as error:
        return error.diagnostics
    return ()


def findings_edited(root: Path, name: str, *edits: tuple[str, str]) -> tuple[Diagnostic, ...]:
    """What is wrong with a shipped spec after edits to its own file."""
    make_project(root, [(f"{name}.yaml", old, new) for old, new in edits])
    return findings_of(str(root / "pipelines" / f"{name}.yaml"))


def render(plan: PipelinePlan) -> dict[str, str]:
    """Every generated file of a plan."""
    return render_pipeline(ProvedPlan(plan, (), ()), ())
