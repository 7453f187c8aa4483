"""Every folder of tests/cases: exact text on both streams, and the exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_runner import case_folders, run_case


@pytest.mark.parametrize("folder", case_folders(), ids=lambda path: path.name)
def test_case(folder: Path, tmp_path: Path) -> None:
    outcome = run_case(folder, tmp_path)
    for name in ("exit", "stdout", "stderr"):
        assert getattr(outcome, name) == (folder / name).read_bytes().decode(), name


def test_there_are_cases() -> None:
    assert len(case_folders()) >= 20
