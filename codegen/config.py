"""Settings of a project: `[tool.kpipe]` of its pyproject.toml, or its kpipe.toml.

This module and what it imports stay cheap: the unchanged path of `kpipe generate` runs them in
every process.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

KEYS = ("output", "pipelines", "semantics", "templates")
DEFAULT_OUTPUT = "generated"
ENVIRONMENT_PREFIX = "KPIPE_"
ENVIRONMENT = ("KPIPE_CACHE_DIR",)
SHIPPED = Path(__file__).resolve().parents[1]  # holds templates/ and pipelines/ of kpipe itself
SHIPPED_TEMPLATES = SHIPPED / "templates"
_MARKS = ("pyproject.toml", "kpipe.toml", ".git")


class Config(NamedTuple):
    """Settings of one project; every path is absolute."""

    root: Path  # folder of the project
    output: Path  # holds one folder per pipeline
    templates: tuple[Path, ...]  # searched before kpipe's own
    pipelines: tuple[str, ...]  # globs below root, used where no spec is named
    semantics: Path | None = None  # the table of measured semantics that findings cite

    @property
    def template_folders(self) -> tuple[Path, ...]:
        """Folders in which a template is looked for, the first hit wins."""
        return (*self.templates, SHIPPED_TEMPLATES)


def project_root(path: Path) -> Path:
    """Nearest folder at or above a file's that holds pyproject.toml, kpipe.toml or .git.

    The file's own folder where none does.
    """
    folder = path.resolve().parent
    for candidate in (folder, *folder.parents):
        if any((candidate / mark).exists() for mark in _MARKS):
            return candidate
    return folder


def geometry_folders(spec: Path) -> tuple[Path, ...]:
    """Where geometries are looked for: beside the spec, in its project, shipped with kpipe."""
    return (
        spec.parent / "geometry",
        spec.parent.parent / "geometry",
        project_root(spec) / "pipelines" / "geometry",
        SHIPPED / "pipelines" / "geometry",
    )


def geometry_file(spec: Path, name: str) -> Path | None:
    """The geometry of that name in the first of its folders that has one."""
    files = (folder / f"{name}.yaml" for folder in geometry_folders(spec))
    return next((file for file in files if file.is_file()), None)


def load_config(spec: Path) -> Config:
    """Settings of the project that a file belongs to; defaults where it has none.

    Raises SpecError KP801 for unreadable TOML, unknown keys, wrong types, template folders that
    do not exist and paths that leave the project.
    """
    root = project_root(spec)
    path, table = _settings(root)
    findings: list[tuple[str, str, tuple[str, ...], str]] = []
    for key in table:
        if key not in KEYS:
            findings.append((key, f"unknown setting `{key}`", KEYS, key))
    output = table.get("output", DEFAULT_OUTPUT)
    if not isinstance(output, str) or not output:
        findings.append(("output", "`output` takes the relative path of a folder", (), ""))
        output = DEFAULT_OUTPUT
    templates = _texts(table, "templates", findings)
    pipelines = _texts(table, "pipelines", findings)
    semantics = table.get("semantics", "")
    if not isinstance(semantics, str) or ("semantics" in table and not semantics):
        findings.append(("semantics", "`semantics` takes the relative path of a file", (), ""))
        semantics = ""
    paths = (("output", (output,)), ("semantics", (semantics,)))
    for key, texts in (*paths, ("templates", templates), ("pipelines", pipelines)):
        findings += [
            (key, f"`{key}` leaves the project: `{text}`", (), "")
            for text in texts
            if not _stays(root, text)
        ]
    findings += [
        ("templates", f"`templates`: no such folder: `{text}`", (), "")
        for text in templates
        if _stays(root, text) and not (root / text).is_dir()
    ]
    if findings:
        _refuse(path, findings)
    folders = tuple(root / text for text in templates)
    return Config(root, root / output, folders, pipelines, root / semantics if semantics else None)


def check_environment(variables: Any = None) -> None:
    """Refuse variables that look like settings of kpipe and are none.

    A misspelt or invented variable would otherwise be silently without effect.  Raises SpecError
    KP802 with one finding per variable.
    """
    names = sorted(os.environ if variables is None else variables)
    wrong = [n for n in names if n.startswith(ENVIRONMENT_PREFIX) and n not in ENVIRONMENT]
    if not wrong:
        return
    from kpipe.codegen.diagnostics import Diagnostic, SpecError, did_you_mean

    found = []
    for name in wrong:
        near = did_you_mean(name, ENVIRONMENT)
        hint = f"did you mean `{near}`? " if near else ""
        hint += f"unset {name}; schedules and tiles are set in the spec, nothing else is a variable"
        message = f"unknown environment variable `{name}`"
        found.append(Diagnostic("KP802", message, None, allowed=ENVIRONMENT, help=hint))
    raise SpecError(found)


def _settings(root: Path) -> tuple[Path, dict[str, Any]]:
    """The file that holds the settings, and the settings."""
    own, shared = root / "kpipe.toml", root / "pyproject.toml"
    tables = {}
    for path in (own, shared):
        if path.is_file():
            table = _read_toml(path)
            if path == shared:
                tool = table.get("tool", {})
                if not isinstance(tool, dict) or "kpipe" not in tool:
                    continue
                table = tool["kpipe"]
                if not isinstance(table, dict):
                    _refuse(path, [("kpipe", "`tool.kpipe` takes a table", (), "")])
            tables[path] = table
    if len(tables) == 2:
        message = "kpipe.toml and [tool.kpipe] of pyproject.toml both hold settings"
        _refuse(own, [("", message, (), "")], "keep one of the two")
    return next(iter(tables.items()), (shared, {}))


def _read_toml(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if path.name == "pyproject.toml" and b"kpipe" not in data:
        return {}  # not our file to judge, and reading it takes time
    import tomllib

    try:
        return tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = re.search(r" ?\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(where[1]), int(where[2])) if where else (1, 1)
        reason = str(error)[: where.start()] if where else str(error)
        _refuse(
            path, [("", f"not TOML: {reason[:1].lower()}{reason[1:]}", (), "")], at=(line, column)
        )
        raise


def _texts(table: dict[str, Any], key: str, findings: list) -> tuple[str, ...]:
    value = table.get(key, [])
    if isinstance(value, list) and all(isinstance(item, str) and item for item in value):
        return tuple(value)
    findings.append((key, f"`{key}` takes a list of texts", (), ""))
    return ()


def _stays(root: Path, text: str) -> bool:
    fixed = re.split(r"[*?\[]", text, maxsplit=1)[0]
    if Path(text).is_absolute() or ".." in Path(text).parts:
        return False
    return (root / fixed).resolve().is_relative_to(root)


def _refuse(
    path: Path,
    findings: list[tuple[str, str, tuple[str, ...], str]],
    help: str = "",
    at: tuple[int, int] = (1, 1),
) -> None:
    from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError, did_you_mean

    shown = display(path)
    lines = path.read_text("utf-8", errors="replace").splitlines() if path.is_file() else []
    found = []
    for key, message, allowed, word in findings:
        line, column = at
        for number, text in enumerate(lines, 1):
            match = re.match(rf'\s*"?{re.escape(key)}"?\s*=', text) if key else None
            if match:
                line, column = number, len(text) - len(text.lstrip()) + 1
                break
        near = did_you_mean(word, KEYS) if word else ""
        hint = f"did you mean `{near}`?" if near else help
        span = Span(shown, line, column, line, column + max(len(key), 1))
        found.append(Diagnostic("KP801", message, span, allowed=allowed, help=hint))
    raise SpecError(found)


def display(path: Path) -> str:
    """A path as a person would type it from here, with forward slashes."""
    shown = os.path.relpath(path)
    return (str(path) if shown.startswith(os.path.join("..", "..", "..")) else shown).replace(
        os.sep, "/"
    )
