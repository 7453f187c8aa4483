"""The results of a tuning run: a file of JSON lines that only ever grows.

The first line says what was measured, by the whole plan, and where.  Every other line is one
finished thing: a round over the candidates of a step, a candidate that failed, or how far the
candidates' outputs are from that of the present choice.  A line that a killed run has left
unfinished is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA = "kpipe.tune_results/1"
_SAME = ("schema", "gpu", "arch", "plan")  # what two runs into one file must share


class ResultsError(ValueError):
    """A file that cannot be continued; the text says why."""


class Results:
    """What has been measured: rounds by step and number, failures by step and candidate."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        """Open a file, or begin it with `header`.  Raises ResultsError for another run's file."""
        self.path = path
        self.rounds: dict[str, dict[int, dict[str, float]]] = {}
        self.failed: dict[str, dict[str, str]] = {}
        self.differences: dict[str, dict[str, float]] = {}
        try:
            self._open(header)
        except OSError as error:
            raise ResultsError(f"`{path}`: {error.strerror or error}") from None

    def _open(self, header: Mapping[str, Any]) -> None:
        text = self.path.read_text() if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            self.path.write_text(whole)
        if not whole:
            self._append(header)
            return
        try:
            first, *lines = (json.loads(line) for line in whole.splitlines())
            for name in _SAME:
                if first.get(name) != header[name]:
                    raise ResultsError(_other(self.path, name, first.get(name), header[name]))
            for line in lines:
                self._take(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ResultsError):
                raise
            raise ResultsError(f"`{self.path}` is no file of results: {error}") from None

    def _take(self, line: Mapping[str, Any]) -> None:
        step = line["step"]
        if "round" in line:
            self.rounds.setdefault(step, {})[int(line["round"])] = dict(line["us"])
        elif "failed" in line:
            self.failed.setdefault(step, {})[line["failed"]] = line["error"]
        else:
            self.differences.setdefault(step, {}).update(line["differences"])

    def add(self, line: Mapping[str, Any]) -> None:
        """Keep a finished thing, on disk first."""
        self._append(line)
        self._take(line)

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")


def _other(path: Path, name: str, before: object, now: object) -> str:
    if name == "plan":
        return f"`{path}` has results of another plan; name another file, or delete it"
    return f"`{path}`: `{name}` is {before!r} there and {now!r} here; name another file"
