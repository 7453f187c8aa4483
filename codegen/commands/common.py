"""What the commands share: which specs are meant, how findings are shown, exit codes."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kpipe.codegen.config import display, load_config
from kpipe.codegen.diagnostics import (
    Diagnostic,
    count_line,
    render_concise,
    render_github,
    render_json,
    render_text,
)

# Findings that mean "this could not be read", told apart from "this is wrong".
UNREADABLE = frozenset(
    [
        *("KP100", "KP105", "KP106", "KP107", "KP801", "KP802", "KP804", "KP808", "KP809"),
        "KP820",
    ]
)
PROGRESS_AFTER = 2.0  # seconds
WIDTH = 110  # of what is printed for people
GITHUB_CAP = 10  # annotations of one level that GitHub shows per step
_HEADLINE = re.compile(r"(?m)^((?:[^|\n]*?: )?)((error|warning|note)\[KP\d{3}\])(: )")
_SHADES = {"error": "red", "warning": "yellow", "note": "cyan"}


def exit_code(diagnostics: Iterable[Diagnostic]) -> int:
    """2 where something could not be read, else 1 where there is an error, else 0."""
    errors = [d for d in diagnostics if d.severity == "error"]
    if any(d.code in UNREADABLE for d in errors):
        return 2
    return 1 if errors else 0


def expand_specs(specs: tuple[str, ...]) -> tuple[str, ...]:
    """The specs on the command line; without any, those that the project's settings name.

    Raises UsageError where that leaves nothing.  A spec named twice is taken once.
    """
    if specs:
        return tuple({Path(spec).resolve(): spec for spec in reversed(specs)}.values())[::-1]
    config = load_config(Path("pyproject.toml"))
    if not config.pipelines:
        raise click.UsageError("name a SPEC, or list `pipelines` in the project's settings")
    found = sorted({p for pattern in config.pipelines for p in config.root.glob(pattern)})
    if not found:
        listed = ", ".join(config.pipelines)
        raise click.UsageError(f"no file matches `pipelines` of the project's settings: {listed}")
    return tuple(display(path) for path in found)


def use_color(choice: str, *, err: bool = False) -> bool:
    """Whether to colour: as asked, else for a terminal without NO_COLOR."""
    if choice != "auto":
        return choice == "always"
    return not os.environ.get("NO_COLOR") and (sys.stderr if err else sys.stdout).isatty()


def show_findings(
    diagnostics: Iterable[Diagnostic],
    texts: Mapping[str, str],
    form: str,
    *,
    color: str,
    err: bool = False,
) -> None:
    """Print findings as text, concise, json, github or sarif."""
    ordered = sorted(diagnostics)
    if form == "json":
        shown = render_json(ordered)
    elif form == "github":
        shown = _capped_github(ordered)
    elif form == "sarif":
        from kpipe.codegen.sarif import render_sarif  # lazily: it loads the whole catalogue

        shown = render_sarif(ordered)
    elif form == "concise":
        shown = render_concise(ordered)
    else:
        shown = render_text(ordered, texts)
    colored = form in ("text", "concise") and use_color(color, err=err)
    click.echo(_shaded(shown) if colored else shown, nl=False, err=err, color=colored)


def _shaded(text: str) -> str:
    def shade(match: re.Match[str]) -> str:
        word = click.style(match[2], fg=_SHADES[match[3]], bold=True)
        return f"{match[1]}{word}{match[4]}"

    return _HEADLINE.sub(shade, text)


def _capped_github(ordered: list[Diagnostic]) -> str:
    """GitHub shows ten annotations of a level and step: the rest are lines of the log.

    Where some are left out the last line is a notice that counts them.
    """
    levels = ("error", "warning", "note")
    listed = {level: [d for d in ordered if d.severity == level] for level in levels}
    hidden = [d for found in listed.values() for d in found[GITHUB_CAP:]]
    if hidden:  # the notice about them takes the place of one
        hidden += listed["note"][GITHUB_CAP - 1 : GITHUB_CAP]
        listed["note"] = listed["note"][: GITHUB_CAP - 1]
    kept = [_in_workspace(d) for found in listed.values() for d in found[:GITHUB_CAP]]
    shown = render_github(sorted(kept))
    if not hidden:
        return shown
    log = "".join(
        f"not annotated: {line}\n" for line in render_concise(sorted(hidden)).splitlines()
    )
    more = f"{count_line(hidden)} more: GitHub shows {GITHUB_CAP} of a level, the log lists them"
    return f"{shown}{log}::notice title=kpipe::{more}\n"


def _in_workspace(diagnostic: Diagnostic) -> Diagnostic:
    """The finding with its path as GitHub wants it: relative to the checkout."""
    root, span = os.environ.get("GITHUB_WORKSPACE"), diagnostic.span
    if not root or span is None:
        return diagnostic
    path = Path(span.path).resolve()
    if not path.is_relative_to(Path(root).resolve()):
        return diagnostic
    relative = path.relative_to(Path(root).resolve()).as_posix()
    return replace(diagnostic, span=replace(span, path=relative))


def run_runtime(module: str, arguments: Iterable[str]) -> int:
    """A module of the runtime in its own process: the generator never loads it, nor torch."""
    import subprocess

    return subprocess.run([*runtime_command(module), *arguments], check=False).returncode


def runtime_command(module: str) -> list[str]:
    """What starts a module of the runtime."""
    quiet = "ignore:Failed to initialize NumPy"  # torch says so on import; nothing uses NumPy
    return [sys.executable, "-W", quiet, "-m", f"kpipe.runtime.{module}"]


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """A paragraph as lines of at most WIDTH characters; further lines are indented deeper."""
    import textwrap

    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def aligned(rows: Iterable[tuple[str, ...]], indent: str = "") -> list[str]:
    """Rows as lines with two spaces between columns, each column as wide as its widest cell."""
    table = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    return [
        indent + "  ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


class Progress:
    """A bar on a terminal's stderr, for runs that take longer than `delay` seconds, two by
    default."""

    def __init__(self, total: int = 0, delay: float | None = None) -> None:
        self.total = total
        self.delay = PROGRESS_AFTER if delay is None else delay
        self.started = time.monotonic()
        self.bar: Any = None

    def step(self, number: int, name: str, total: int = 0) -> None:
        """Say which item is being worked on, of how many."""
        if self.bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self.started <= self.delay:
                return
            from rich.console import Console  # lazily: most runs are over before
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True), transient=True)
            self.bar.add_task("")
            self.bar.start()
        task = self.bar.task_ids[0]
        of = total or self.total
        self.bar.update(task, completed=number, total=of, description=f"{number}/{of}  {name}")

    def say(self, line: str) -> None:
        """A line on stderr, above the bar."""
        if self.bar is None:
            click.echo(line, err=True)
        else:
            self.bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Wipe the bar."""
        if self.bar is not None:
            self.bar.stop()
