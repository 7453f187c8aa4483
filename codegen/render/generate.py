"""One spec to the difference between its generated folder and its new text."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from kpipe.codegen.cache import tool_digest
from kpipe.codegen.config import Config, display, geometry_file
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.plan.model import PipelinePlan
from kpipe.codegen.proof.api import prove_pipeline
from kpipe.codegen.proof.proved import ProvedPlan
from kpipe.codegen.render.manifest import (
    FILE_NAME,
    Manifest,
    ManifestError,
    digest,
    label,
    labelled,
    read_manifest,
    render_manifest,
    templates_of,
)
from kpipe.codegen.render.publish import Changes, compare, read_state
from kpipe.codegen.version import __version__


@dataclass(frozen=True)
class Prepared:
    """A spec ready to be published."""

    spec: str
    plan: PipelinePlan
    changes: Changes
    same_but_tool: bool  # every byte is right; only the manifest's version of kpipe is older


def prepare(
    spec: str, config: Config, output: Path, texts: dict[str, str], *, force: bool = False
) -> Prepared:
    """Plan and render a spec and compare with the folder; writes nothing.

    `texts` receives the text of every file read.  Raises SpecError with every error found;
    KP804 for a manifest that cannot be read (unless `force`), KP807 for a folder that belongs to
    another spec.
    """
    own: dict[str, str] = {}
    try:
        proved = prove_pipeline(spec, own)
    finally:
        texts.update(own)
    return compared(spec, proved, own, config, output, force=force)


def compared(
    spec: str,
    proved: ProvedPlan,
    own: dict[str, str],
    config: Config,
    output: Path,
    *,
    force: bool = False,
) -> Prepared:
    """A proved spec, rendered and compared with its folder; writes nothing.

    `own` are the texts that it was planned from.  Raises SpecError as `prepare`.
    """
    from kpipe.codegen.render.api import render_pipeline

    plan = proved.pipeline
    files = render_pipeline(proved, config.templates)
    folder = output / plan.name
    old = _old_manifest(folder, force)
    if old is not None:
        _check_owner(spec, folder, old, config)
    manifest = _manifest(spec, plan, config, own, files)
    new = {**files, FILE_NAME: render_manifest(manifest)}
    state = read_state(output, folder, {*new, *(old.files if old else ())})
    changes = compare(state, new, old)
    retooled = old is not None and old._replace(tool=manifest.tool, kpipe=manifest.kpipe)
    only_manifest = all(change.path == FILE_NAME for change in changes.drift)
    return Prepared(spec, plan, changes, only_manifest and retooled == manifest)


def _manifest(
    spec: str, plan: PipelinePlan, config: Config, texts: dict[str, str], files: dict[str, str]
) -> Manifest:
    """`texts` are exactly the bytes that were planned from: the loader takes UTF-8 only."""
    inputs = {label(Path(path), config.root): digest(text) for path, text in texts.items()}
    if config.semantics is not None:  # reasons in the generated code may cite its rows
        with contextlib.suppress(OSError):  # nothing cites it, or it would have been missed
            inputs[label(config.semantics, config.root)] = digest(config.semantics.read_bytes())
    geometry = geometry_file(Path(spec), plan.geometry)
    assert geometry is not None  # the planner has read it
    return Manifest(
        pipeline=plan.name,
        spec=label(Path(spec), config.root),
        kpipe=__version__,
        geometry=label(geometry, config.root),
        inputs=inputs,
        templates=templates_of(plan, config.template_folders),
        tool=tool_digest(),
        files={path: digest(text) for path, text in files.items()},
    )


def _old_manifest(folder: Path, force: bool) -> Manifest | None:
    try:
        found = read_manifest(folder)
    except ManifestError as error:
        if force:
            return None
        shown = display(folder / FILE_NAME)
        raise SpecError(
            (
                Diagnostic(
                    "KP804",
                    f"`{shown}` {error}, so kpipe cannot tell its files from yours",
                    Span(shown, 1, 1, 1, 1),
                    help="restore it from version control, or overwrite every file with `--force`",
                ),
            )
        ) from None
    return found[0] if found else None


def _check_owner(spec: str, folder: Path, old: Manifest, config: Config) -> None:
    """A folder made from another spec that still exists is not ours to overwrite."""
    other = labelled(old.spec, config.root)
    if old.spec != label(Path(spec), config.root) and other.is_file():
        message = f"`{display(folder)}` is generated from `{display(other)}`, which still exists"
        help = "give one of the two specs another `name`"
        raise SpecError((Diagnostic("KP807", message, Span(spec, 1, 1, 1, 1), help=help),))
