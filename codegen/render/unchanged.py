"""The fast path of `kpipe generate`: is there anything to do at all?

It imports neither the planner nor any of the libraries that the planner and the renderer need.
It may say "no idea" at any time, which costs a full run; it says "unchanged" only where a full
run would write nothing.
"""

from __future__ import annotations

from pathlib import Path

from kpipe.codegen.cache import tool_digest
from kpipe.codegen.config import Config, geometry_file
from kpipe.codegen.render.manifest import (
    Manifest,
    ManifestError,
    digest,
    label,
    labelled,
    read_manifest,
    render_manifest,
    shared_templates,
    template_digest,
    template_names,
)
from kpipe.codegen.version import __version__


def unchanged_folder(spec: Path, config: Config, output: Path) -> Path | None:
    """The folder below `output` that is up to date with the spec, None where none is known to be.

    Inputs (spec, what it extends, geometry, table of semantics), templates in their search order,
    kpipe's sources and version, and every generated file must have the digests of the manifest.
    """
    try:
        name = label(spec, config.root)
        for folder in _candidates(spec, output):
            found = read_manifest(folder)
            if found is None or found[0].spec != name or folder.name != found[0].pipeline:
                continue
            manifest, text = found
            if text == render_manifest(manifest) and _is_current(spec, config, manifest):
                return folder if _files_match(folder, output, manifest) else None
    except (ManifestError, OSError, ValueError):
        return None
    return None


def _candidates(spec: Path, output: Path) -> list[Path]:
    """Folders that may belong to the spec, the one of its own name first."""
    first = output / spec.stem
    others = sorted(path for path in output.iterdir() if path.is_dir() and path != first)
    return [first, *others]


def _is_current(spec: Path, config: Config, manifest: Manifest) -> bool:
    if manifest.kpipe != __version__ or manifest.spec not in manifest.inputs:
        return False
    if any(
        digest(labelled(name, config.root).read_bytes()) != recorded
        for name, recorded in manifest.inputs.items()
    ):
        return False
    table = config.semantics
    if table is not None and table.is_file() and label(table, config.root) not in manifest.inputs:
        return False
    geometry = geometry_file(spec, Path(manifest.geometry).stem)
    if geometry is None or label(geometry, config.root) != manifest.geometry:
        return False
    folders = config.template_folders
    if shared_templates(template_names(folders)) != shared_templates(manifest.templates):
        return False
    if any(
        template_digest(name, folders) != recorded for name, recorded in manifest.templates.items()
    ):
        return False
    return manifest.tool == tool_digest()


def _files_match(folder: Path, output: Path, manifest: Manifest) -> bool:
    root = output.resolve()
    for name, recorded in manifest.files.items():
        path = folder / name
        if path.is_symlink() or not path.resolve().is_relative_to(root):
            return False
        if digest(path.read_bytes()) != recorded:
            return False
    return True
