"""manifest.json of a generated folder: what it was made from, and what was written.

The text is a pure function of the inputs: keys sorted, LF, no time, no user, no absolute path.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from kpipe.codegen.config import SHIPPED

if TYPE_CHECKING:
    from kpipe.codegen.plan.model import PipelinePlan

SCHEMA = "kpipe.manifest/1"
FILE_NAME = "manifest.json"
SHIPPED_PREFIX = "kpipe:"
TEMPLATE_SUFFIX = ".jinja"
KERNELS = "kernels/"


class ManifestError(ValueError):
    """A manifest that cannot be used; the text says why."""


class Manifest(NamedTuple):
    """A manifest; digests are lower-case SHA-256."""

    pipeline: str  # name of the pipeline and of the folder
    spec: str  # path relative to the project
    kpipe: str  # version that generated
    geometry: str  # which of `inputs` is the geometry
    inputs: Mapping[str, str]
    templates: Mapping[str, str]
    tool: str
    files: Mapping[str, str]


def digest(data: bytes | str) -> str:
    """SHA-256 of bytes, or of a text's UTF-8."""
    return hashlib.sha256(data.encode("utf-8") if isinstance(data, str) else data).hexdigest()


def label(path: Path, root: Path) -> str:
    """A file's name in the manifest: relative to the project, or `kpipe:` and the shipped path."""
    resolved = path.resolve()
    if not resolved.is_relative_to(root) and resolved.is_relative_to(SHIPPED):
        return SHIPPED_PREFIX + resolved.relative_to(SHIPPED).as_posix()
    return os.path.relpath(resolved, root).replace(os.sep, "/")


def labelled(name: str, root: Path) -> Path:
    """The file that `label` named."""
    if name.startswith(SHIPPED_PREFIX):
        return SHIPPED / name.removeprefix(SHIPPED_PREFIX)
    return root / name


def template_names(folders: Iterable[Path]) -> frozenset[str]:
    """Names of all templates below the folders, such as `kernels/rms_norm.py.jinja`."""
    names = set()
    for folder in folders:
        for where, _, files in os.walk(folder):
            inner = os.path.relpath(where, folder).replace(os.sep, "/")
            start = "" if inner == "." else f"{inner}/"
            names.update(f"{start}{name}" for name in files if name.endswith(TEMPLATE_SUFFIX))
    return frozenset(names)


def template_digest(name: str, folders: Iterable[Path]) -> str | None:
    """Digest of the template that the search finds, or None where no folder has it."""
    for folder in folders:
        try:
            return digest((folder / name).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            continue
    return None


def shared_templates(names: Iterable[str]) -> frozenset[str]:
    """Templates that every pipeline depends on: all but the kernels themselves."""
    return frozenset(
        name
        for name in names
        if not name.startswith(KERNELS) or PurePosixPath(name).name.startswith("_")
    )


def templates_of(plan: PipelinePlan, folders: tuple[Path, ...]) -> dict[str, str]:
    """Digest of every template that the plan's text depends on."""
    names = template_names(folders)
    named = {plan.kernel(op) for op in plan.ops} - {""}
    kernels = {f"{KERNELS}{name}.py{TEMPLATE_SUFFIX}" for name in named}
    wanted = shared_templates(names) | (kernels & names)
    return {name: template_digest(name, folders) or "" for name in sorted(wanted)}


def render_manifest(manifest: Manifest) -> str:
    """The text of manifest.json."""
    return json.dumps({"schema": SCHEMA, **manifest._asdict()}, indent=2, sort_keys=True) + "\n"


def parse_manifest(text: str) -> Manifest:
    """The manifest of a text.

    Raises ManifestError for anything but a manifest of this schema, and for names of files that
    would leave the folder.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ManifestError(f"not JSON: {str(error)[:1].lower()}{str(error)[1:]}") from None
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ManifestError(f"not of schema {SCHEMA}")
    if set(data) != set(Manifest._fields):
        raise ManifestError("its keys are not those of a manifest")
    for key in Manifest._fields:
        if not _is_valid(key, data[key]):
            raise ManifestError(f"`{key}` has a wrong value")
    return Manifest(**data)


def _is_valid(key: str, value: Any) -> bool:
    if key not in ("inputs", "templates", "files"):
        return isinstance(value, str)
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        return False
    return key == "inputs" or all(is_inner(name) for name in value)


def is_inner(name: str) -> bool:
    """True for a plain relative path that cannot leave the folder it is below."""
    parts = name.split("/")
    return bool(name) and not {"", ".", ".."} & set(parts) and "\\" not in name and ":" not in name


def read_manifest(folder: Path) -> tuple[Manifest, str] | None:
    """Manifest and text of a generated folder, None where it has no manifest.

    Raises ManifestError where the file is there and is no manifest.
    """
    try:
        text = (folder / FILE_NAME).read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"cannot be read: {error}") from None
    return parse_manifest(text), text
