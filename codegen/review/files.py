"""Which generated files change, why, and how the working tree stands to that."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kpipe.codegen.cache import tool_digest
from kpipe.codegen.config import Config, display
from kpipe.codegen.evidence import kernel_digest
from kpipe.codegen.proof.proved import ProvedPlan
from kpipe.codegen.render.generate import compared
from kpipe.codegen.render.manifest import (
    FILE_NAME,
    KERNELS,
    TEMPLATE_SUFFIX,
    Manifest,
    ManifestError,
    digest,
    read_manifest,
    templates_of,
)
from kpipe.codegen.review.model import FileChange, Files
from kpipe.codegen.review.side import Side

_DISK = {
    "unchanged": "current",
    "changed": "stale",
    "new": "stale",
    "missing": "missing",
    "hand_edited": "hand edit",
    "orphan": "orphan",
}


@dataclass(frozen=True)
class Folder:
    """A generated folder of one side: what kpipe writes now, what lies there, its manifest.

    `rendered` is None where there is no proved plan, `manifest` where the folder has none.
    """

    path: Path | None
    rendered: Mapping[str, bytes] | None
    written: Mapping[str, bytes]
    manifest: Manifest | None
    disk: Mapping[str, str]

    def kernel_digests(self) -> dict[str, str]:
        """Kernel -> digest of its file: as written, failing that as rendered."""
        files = {**(self.rendered or {}), **self.written}
        return {
            PurePosixPath(name).stem: kernel_digest(data)
            for name, data in files.items()
            if name.startswith(KERNELS)
        }


def new_folder(spec: str, side: Side, texts: dict[str, str], config: Config) -> Folder | None:
    """What the new side generates, beside what lies in the working tree; None if not proved.

    Raises SpecError KP806 or KP807 for a folder that kpipe may not write.
    """
    if side.pipeline is None or side.verdict.kind != "proved":
        return None
    proved = ProvedPlan(side.pipeline, (), side.verdict.basis)
    prepared = compared(spec, proved, texts, config, config.output, force=True)
    entries = prepared.changes.entries
    rendered = {entry.path: entry.new for entry in entries if entry.new is not None}
    disk = {entry.path: _DISK[entry.kind] for entry in entries}
    return Folder(prepared.changes.folder, rendered, {}, None, disk)


def old_folder(side: Side, path: Path | None, config: Config, same: Folder | None) -> Folder:
    """What the old side's spec gives with this kpipe, and what lies there.

    `path` is its generated folder or None; `same` is the new side's, where both plans are equal.
    """
    rendered: Mapping[str, bytes] | None = same.rendered if same else None
    if rendered is None and side.pipeline is not None and side.verdict.kind == "proved":
        from kpipe.codegen.render.api import render_pipeline

        texts = render_pipeline(ProvedPlan(side.pipeline, (), ()), config.templates)
        rendered = {name: text.encode("utf-8") for name, text in texts.items()}
    manifest = None
    if path is not None:
        try:
            found = read_manifest(path)
            manifest = found[0] if found else None
        except ManifestError:
            manifest = None
    written = {}
    if path is not None and manifest is not None:
        named = (name for name in manifest.files if (path / name).is_file())
        written = {name: (path / name).read_bytes() for name in named}
    return Folder(path, rendered, written, manifest, {})


def file_changes(old: Folder, new: Folder, plan: Side, config: Config) -> Files:
    """Every generated file that differs between the sides, or that is not as it should be."""
    assert new.rendered is not None and new.path is not None and plan.pipeline is not None
    committed = old.manifest is not None
    before = old.written if committed else old.rendered
    assert before is not None
    causes = _Causes(old, templates_of(plan.pipeline, config.template_folders))
    changes = []
    for path in sorted({*before, *new.rendered, *new.disk} - {FILE_NAME}):
        effect = _effect(path, before.get(path), new.rendered.get(path))
        disk = new.disk.get(path, "current")
        if effect or disk != "current":
            why = causes.of(path, new.rendered.get(path)) if effect else ()
            changes.append(FileChange(path, effect, why, disk))
    what = "its generated folder" if committed else "what its spec generates"
    written = (committed, (new.path / FILE_NAME).is_file())
    return Files(display(new.path), what, tuple(changes), written)


def comparable(old: Folder, new: Folder | None) -> bool:
    """Whether both sides have files to compare."""
    return new is not None and (old.manifest is not None or old.rendered is not None)


class _Causes:
    """Why a file differs: by its spec, by the templates, by kpipe, by hand."""

    def __init__(self, old: Folder, templates: Mapping[str, str]) -> None:
        self.old = old
        recorded = old.manifest.templates if old.manifest else templates
        names = {*recorded, *templates}
        self.templates = {n for n in names if recorded.get(n) != templates.get(n)}
        self.tool = old.manifest is not None and old.manifest.tool != tool_digest()

    def of(self, path: str, new: bytes | None) -> tuple[str, ...]:
        rendered = self.old.rendered
        found = []
        if rendered is None or rendered.get(path) != new:
            found.append("spec")
        written = self.old.written.get(path)
        manifest = self.old.manifest
        if rendered is not None and manifest is not None and written != rendered.get(path):
            if written is not None and digest(written) != manifest.files.get(path):
                found.append("hand edit on the old side")
            elif self._template_changed(path):
                found.append("template")
            elif self.tool:
                found.append("tool")
            else:
                found.append("not generated on the old side")
        return tuple(found)

    def _template_changed(self, path: str) -> bool:
        if not path.startswith(KERNELS) or path.endswith("__init__.py"):
            return any(name.startswith("layer/") for name in self.templates)
        shared = (PurePosixPath(name).name.startswith("_") for name in self.templates)
        return f"{path}{TEMPLATE_SUFFIX}" in self.templates or any(shared)


def _effect(path: str, old: bytes | None, new: bytes | None) -> str:
    if old == new:
        return ""
    if old is None or new is None:
        return "removed" if new is None else "new"
    if path.endswith(".py") and _code(old) is not None and _code(old) == _code(new):
        return "comments"
    return "changed"


def _code(data: bytes) -> str | None:
    """A module without comments, docstrings and layout; None where it is not Python."""
    try:
        tree = ast.parse(data)
    except (SyntaxError, ValueError):
        return None
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                body[0] = ast.Pass()
    return ast.dump(tree)
