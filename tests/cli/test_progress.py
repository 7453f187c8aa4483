"""The bar of long runs: on a terminal's stderr, after two seconds, wiped at the end."""

from __future__ import annotations

import io

import pytest

from kpipe.codegen.commands import common


class Terminal(io.StringIO):
    """A stderr that says whether it is a terminal."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize(
    ("terminal", "after", "shown"), [(True, -1.0, True), (True, 60.0, False), (False, -1.0, False)]
)
def test_bar(terminal: bool, after: float, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Terminal(terminal)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(common, "PROGRESS_AFTER", after)
    monkeypatch.setenv("TERM", "xterm")
    progress = common.Progress()
    progress.step(3, "fork", 10)
    progress.step(7, "fork", 10)
    progress.close()
    text = stderr.getvalue()
    assert ("7/10" in text and "fork" in text) is shown
    assert shown or not text
