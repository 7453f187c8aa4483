"""The tutorial: its commands run, and print what it shows."""

from __future__ import annotations

from pathlib import Path

from tutorial_runner import PAGE, as_run


def test_the_tutorial_shows_what_is_printed(tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert as_run(text, tmp_path) == text, "python tests/cli/tutorial_runner.py"
    spoken = text.partition("## Generate")[2]
    assert "generated/dsa_tp/layer.py" in spoken and " generated/dsa_tp/kernels" not in spoken
    assert text.count("error[") == 1  # the one that it makes on purpose
