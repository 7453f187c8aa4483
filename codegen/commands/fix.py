"""`kpipe check --fix`: the repairs that findings carry, applied to the files of the project.

Texts are edited by span, so layout and comments stay.  A file is replaced whole or not at all,
and none outside the project of the checked spec is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from kpipe.codegen.config import project_root
from kpipe.codegen.diagnostics import Diagnostic, Edit, Span
from kpipe.codegen.edits import edited


@dataclass(frozen=True)
class Change:
    """The edits of one or more findings, by the file that they change (links resolved)."""

    findings: tuple[Diagnostic, ...]
    edits: tuple[tuple[Path, Edit], ...]


def apply_fixes(
    found: Iterable[tuple[str, Diagnostic]], texts: Mapping[str, str]
) -> tuple[str, ...]:
    """Apply the repairs of findings, each given with the spec that it was found in.

    `texts` are the files as they were checked; a file that has changed since stays as it is.
    Of repairs that overlap the first by place is applied.  Returns one line per file with
    findings, `PATH: fixed N of M findings`, sorted; nothing was written where every N is 0.
    Raises UsageError where a file cannot be written.
    """
    pairs = sorted(dict.fromkeys(found), key=lambda pair: pair[1])
    unique = tuple(dict.fromkeys(finding for _, finding in pairs))
    repairs = _accepted(_repairs(pairs), texts)
    changes: dict[Path, list[Edit]] = {}
    for repair in repairs:
        for path, edit in repair.edits:
            changes.setdefault(path, []).append(edit)
    names = {Path(name).resolve(): name for name in reversed(texts)}
    for path, edits in changes.items():
        replace_file(path, edited(_raw(path), edits), names[path])
    fixed = {finding for repair in repairs for finding in repair.findings}
    counts: dict[str, list[bool]] = {}
    for finding in unique:
        if finding.span is not None:
            counts.setdefault(finding.span.path, []).append(finding in fixed)
    return tuple(
        f"{path}: fixed {sum(hits)} of {len(hits)} finding{'' if len(hits) == 1 else 's'}"
        for path, hits in sorted(counts.items())
    )


def _repairs(pairs: Sequence[tuple[str, Diagnostic]]) -> list[Change]:
    """Findings with the same edits as one repair; none that leaves the project of its spec."""
    grouped: dict[tuple[tuple[Path, Edit], ...], list[Diagnostic]] = {}
    for spec, finding in pairs:
        root = project_root(Path(spec))
        edits = tuple((Path(edit.span.path).resolve(), edit) for edit in finding.fix)
        if edits and all(path.is_relative_to(root) for path, _ in edits):
            grouped.setdefault(edits, []).append(finding)
    return [Change(tuple(findings), edits) for edits, findings in grouped.items()]


def _accepted(repairs: Sequence[Change], texts: Mapping[str, str]) -> list[Change]:
    """The repairs that touch neither one another nor a file that changed since it was read."""
    unchanged = {
        path
        for name, text in texts.items()
        if (path := Path(name).resolve()).is_file() and _raw(path) == text
    }
    taken: list[tuple[Path, Span]] = []
    accepted = []
    for repair in repairs:
        places = [(path, edit.span) for path, edit in repair.edits]
        clear = all(path in unchanged for path, _ in places)
        if clear and not any(_touch(a, b) for a in places for b in taken):
            taken += places
            accepted.append(repair)
    return accepted


def _touch(one: tuple[Path, Span], other: tuple[Path, Span]) -> bool:
    """Whether two places overlap or meet: two insertions at one point have no order."""
    first, second = one[1], other[1]
    return one[0] == other[0] and _start(first) <= _end(second) and _start(second) <= _end(first)


def _start(span: Span) -> tuple[int, int]:
    return span.line, span.column


def _end(span: Span) -> tuple[int, int]:
    return span.end_line, span.end_column


def _raw(path: Path) -> str:
    """A file as the check sees it: every line end and mark kept, wrong bytes replaced."""
    return path.read_bytes().decode("utf-8", errors="replace")


def replace_file(path: Path, text: str, name: str) -> None:
    """Replace a file in one step, with its permissions.  Raises UsageError where that fails."""
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            "wb", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as stream:
            temporary = stream.name
            stream.write(text.encode())
        shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        message = f"cannot write `{name}`: {error.strerror or error}"
        raise click.UsageError(message) from None
