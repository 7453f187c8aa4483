"""`kpipe generate`: publish, check or diff the generated folders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kpipe.codegen.commands.common import (
    Progress,
    aligned,
    exit_code,
    expand_specs,
    show_findings,
)
from kpipe.codegen.config import display, load_config
from kpipe.codegen.diagnostics import Diagnostic, Span, SpecError
from kpipe.codegen.render.unchanged import unchanged_folder

if TYPE_CHECKING:
    from kpipe.codegen.render.generate import Prepared
    from kpipe.codegen.render.publish import Change, Changes

DRIFT_EXIT = 3
PICTURE = ".svg"
_ORDER = ("new", "changed", "missing", "orphan", "hand_edited", "unchanged")
_SEEN = {"hand_edited": "hand-edited"}  # what --check and --diff call it
_DONE = {"missing": "restored", "orphan": "deleted", "hand_edited": "overwritten"}


@dataclass(frozen=True)
class Result:
    """One spec: its folder, and what differs; None where the fast path saw nothing to do."""

    spec: str
    folder: Path
    prepared: Prepared | None


def run(specs: tuple[str, ...], mode: str, out: str | None, force: bool, color: str) -> int:
    """Publish (`write`), list drift (`check`) or show it (`diff`); returns the exit code."""
    paths = expand_specs(specs)
    texts: dict[str, str] = {}
    results, found = _prepare_all(paths, out, force, texts)
    notes = _together(results, texts, found)
    found += _shared_folders(results)
    if mode != "write":  # a newer kpipe that writes the same bytes is not drift
        results = [
            replace(r, prepared=None) if r.prepared and r.prepared.same_but_tool else r
            for r in results
        ]
    prepared = [result.prepared for result in results if result.prepared is not None]
    drifted = [item for item in prepared if item.changes.drift]
    if not found and mode == "write" and drifted:
        from kpipe.codegen.render.publish import publish

        try:
            publish([item.changes for item in drifted], force=force)
        except SpecError as error:
            found += error.diagnostics
    if found:
        show_findings(found, texts, "text", color=color, err=True)
        if mode == "write":
            click.echo("nothing was written", err=True)
        return exit_code(found)
    if mode == "diff":
        for item in drifted:
            click.echo(_diff(item.changes), nl=False)
    for line in _lines(results, _DONE if mode == "write" else _SEEN):
        click.echo(line, err=mode == "diff")
    _talk(drifted, notes, texts, color)
    if mode != "write" and drifted:
        named = " ".join(item.spec for item in drifted)
        click.echo(f"to bring it up to date: kpipe generate {named}", err=True)
        if any(item.changes.of("hand_edited") for item in drifted):
            click.echo("files edited by hand are kept, unless you add --force", err=True)
        return DRIFT_EXIT
    return 0


def _prepare_all(
    paths: tuple[str, ...], out: str | None, force: bool, texts: dict[str, str]
) -> tuple[list[Result], list[Diagnostic]]:
    results: list[Result] = []
    found: list[Diagnostic] = []
    progress = Progress(len(paths))
    for number, path in enumerate(paths, 1):
        progress.step(number, path)
        try:
            config = load_config(Path(path))
            output = Path(out) if out else config.output
            folder = unchanged_folder(Path(path), config, output)
            if folder is not None:
                results.append(Result(path, folder, None))
                continue
            from kpipe.codegen.render.generate import prepare

            prepared = prepare(path, config, output, texts, force=force)
            results.append(Result(path, prepared.changes.folder, prepared))
        except SpecError as error:
            found += [d for d in error.diagnostics if d not in found]
    progress.close()
    return results, found


def _together(
    results: list[Result], texts: dict[str, str], found: list[Diagnostic]
) -> dict[str, tuple[str, ...]]:
    """Prove what pipelines of this run share, if a folder that may change shares something.

    Findings are added to `found`; returns the notes of each spec.
    """
    prepared = [result.prepared for result in results if result.prepared is not None]
    if found or not any(item.plan.shares_memory for item in prepared):
        return {}
    from kpipe.codegen.proof.api import prove_pipeline
    from kpipe.codegen.proof.shared import prove_together

    plans = [
        result.prepared.plan if result.prepared else prove_pipeline(result.spec, texts).pipeline
        for result in results
    ]
    together = prove_together(plans)
    found += together.found
    return together.notes


def _shared_folders(results: list[Result]) -> list[Diagnostic]:
    """Two specs of one run that want the same folder."""
    owners: dict[Path, str] = {}
    found = []
    for result in results:
        folder = result.folder.resolve()
        other = owners.setdefault(folder, result.spec)
        if other != result.spec and Path(other).resolve() != Path(result.spec).resolve():
            message = f"`{other}` and `{result.spec}` both generate `{display(result.folder)}`"
            help = "give one of the two specs another `name`"
            span = Span(result.spec, 1, 1, 1, 1)
            found.append(Diagnostic("KP807", message, span, help=help))
    return found


def _lines(results: list[Result], words: dict[str, str]) -> list[str]:
    heads = aligned((r.spec, display(r.folder), _summary(r, words)) for r in results)
    lines = []
    for head, result in zip(heads, results, strict=True):
        lines.append(head)
        drift = result.prepared.changes.drift if result.prepared else ()
        lines += aligned(((_word(c, words), c.path) for c in drift), "  ") if drift else []
    return lines


def _word(change: Change, words: dict[str, str]) -> str:
    return words.get(change.kind, change.kind)


def _summary(result: Result, words: dict[str, str]) -> str:
    if result.prepared is None or not result.prepared.changes.drift:
        return "unchanged"
    changes = result.prepared.changes
    counts = [(len(changes.of(kind)), words.get(kind, kind)) for kind in _ORDER]  # type: ignore[arg-type]
    return ", ".join(f"{count} {word}" for count, word in counts if count)


def _talk(
    drifted: list[Prepared],
    notes: dict[str, tuple[str, ...]],
    texts: dict[str, str],
    color: str,
) -> None:
    """What a reader of the diff should know and the files do not say loudly."""
    if drifted:
        from kpipe.codegen.proof.replay import replay_warnings

        warnings = [d for item in drifted for d in replay_warnings(item.plan)]
        show_findings(warnings, texts, "text", color=color, err=True)
    for item in drifted:
        for note in notes.get(item.spec, ()):
            click.echo(f"{item.spec}: {note}", err=True)
        for mode, other, reason in item.plan.fallbacks:
            click.echo(f"{item.spec}: {mode} -> {other}: {reason}", err=True)


def _diff(changes: Changes) -> str:
    import difflib

    parts = []
    for change in changes.drift:
        shown = display(changes.folder / change.path)
        old = [] if change.old is None else _split(change.old)
        new = [] if change.new is None else _split(change.new)
        before = "/dev/null" if change.old is None else f"a/{shown}"
        after = "/dev/null" if change.new is None else f"b/{shown}"
        if change.path.endswith(PICTURE):  # to be looked at; its schedule differs in the text
            parts.append(f"Pictures {before} and {after} differ\n")
            continue
        for line in difflib.unified_diff(old, new, before, after):
            parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def _split(data: bytes) -> list[str]:
    """Lines by LF alone, as diff tools count them."""
    pieces = data.decode("utf-8", errors="replace").split("\n")
    return [f"{piece}\n" for piece in pieces[:-1]] + ([pieces[-1]] if pieces[-1] else [])
