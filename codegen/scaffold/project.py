"""The files of a new project: a shipped pipeline to edit, and what stands around it."""

from __future__ import annotations

import re
from pathlib import Path

from kpipe.codegen.config import SHIPPED
from kpipe.codegen.spec.schema import FILES, schema_text
from kpipe.codegen.version import __version__

_OWN = Path(__file__).parent / "files"
_PIPELINES = SHIPPED / "pipelines"
SETTINGS = "pyproject.toml"
_PLACES = {  # path in the project -> name in files/
    SETTINGS: "settings.toml",
    "README.md": "README.md",
    "templates/README.md": "templates-README.md",
    ".gitattributes": "gitattributes",
    ".gitignore": "gitignore",
    ".pre-commit-config.yaml": "pre-commit-config.yaml",
    ".vscode/settings.json": "vscode-settings.json",
    ".vscode/tasks.json": "vscode-tasks.json",
    ".github/workflows/kpipe.yml": "workflow.yml",
}


def pipelines() -> tuple[str, ...]:
    """Names of the shipped pipelines that a project can start from."""
    return tuple(sorted(path.stem for path in _PIPELINES.glob("*.yaml")))


def project_files(pipeline: str) -> dict[str, str]:
    """Path in the project -> text, for a project that starts from a shipped pipeline.

    The pipeline comes with what it extends and with its geometry; the schemas stand where its
    first line says.  Sorted by path.
    """
    chain = _chain(_PIPELINES / f"{pipeline}.yaml")
    files = {name: (_OWN / own).read_text("utf-8") for name, own in _PLACES.items()}
    spec = f"pipelines/{pipeline}.yaml"
    for name, text in files.items():
        files[name] = text.replace("@spec@", spec).replace("@version@", __version__)
    geometry = next(name for path in chain if (name := _value("geometry", path)))
    for path in (*chain, *_chain(_PIPELINES / "geometry" / f"{geometry}.yaml")):
        files[f"pipelines/{path.relative_to(_PIPELINES).as_posix()}"] = path.read_text("utf-8")
    for name, kind in FILES.items():
        files[f"schemas/{name}"] = schema_text(kind)
    return dict(sorted(files.items()))


def _chain(path: Path) -> list[Path]:
    """A shipped file and those that it extends, in order."""
    extends = _value("extends", path)
    return [path, *(_chain(path.parent / extends) if extends else [])]


def _value(key: str, path: Path) -> str:
    """The value of a key of the top level, of a shipped file, as written; "" where it has none."""
    found = re.search(rf"(?m)^{key}: *([\w./-]+)", path.read_text("utf-8"))
    return found[1] if found else ""
