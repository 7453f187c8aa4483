"""Writes what the cases print now as what they should print; review the difference.

python tests/cli/update_cases.py [NAME]...
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from case_runner import EXPECTED, case_folders, run_case


def update(names: list[str]) -> None:
    """Rewrite the expected output of the named cases, or of all."""
    for folder in case_folders():
        if names and folder.name not in names:
            continue
        with tempfile.TemporaryDirectory() as workspace:
            outcome = run_case(folder, Path(workspace))
        for name in EXPECTED:
            (folder / name).write_bytes(getattr(outcome, name).encode())
        print(f"{folder.name}: exit {outcome.exit.strip()}")


if __name__ == "__main__":
    update(sys.argv[1:])
