"""What the commands share: which specs are meant, how findings are shown, exit codes."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from kpipe.codegen.config import display, load_config
from kpipe.codegen.diagnostics import (
    Diagnostic,
    render_concise,
    render_github,
    render_json,
    render_text,
)

# Findings that mean "this could not be read", told apart from "this is wrong".
UNREADABLE = frozenset(
    ["KP100", "KP105", "KP106", "KP107", "KP801", "KP802", "KP804", "KP808", "KP809"]
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
    import os

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
    """GitHub shows ten annotations of a level; the rest is counted in a notice."""
    kept, hidden = [], 0
    counts = {"error": 0, "warning": 0, "note": 0}
    for diagnostic in ordered:
        counts[diagnostic.severity] += 1
        if counts[diagnostic.severity] > GITHUB_CAP:
            hidden += 1
        else:
            kept.append(diagnostic)
    more = f"::notice title=kpipe::{hidden} more findings are in the log of kpipe check\n"
    return render_github(kept) + (more if hidden else "")


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
    """A bar on a terminal's stderr, for runs that take longer than two seconds."""

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.started = time.monotonic()
        self.bar: Any = None

    def step(self, number: int, name: str, total: int = 0) -> None:
        """Say which item is being worked on, of how many."""
        if self.bar is None:
            if not sys.stderr.isatty() or time.monotonic() - self.started <= PROGRESS_AFTER:
                return
            from rich.console import Console  # lazily: most runs are over before
            from rich.progress import Progress as Bar

            self.bar = Bar(console=Console(stderr=True), transient=True)
            self.bar.add_task("")
            self.bar.start()
        task = self.bar.task_ids[0]
        of = total or self.total
        self.bar.update(task, completed=number, total=of, description=f"{number}/{of}  {name}")

    def close(self) -> None:
        """Wipe the bar."""
        if self.bar is not None:
            self.bar.stop()
