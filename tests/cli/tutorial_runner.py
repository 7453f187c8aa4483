"""Runs docs/tutorial.md: every `$` line of its console blocks, in one fresh folder, in order.

python tests/cli/tutorial_runner.py writes what the commands print now into the page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from kpipe.codegen.config import SHIPPED

PAGE = SHIPPED / "docs" / "tutorial.md"
_BLOCK = re.compile(r"(?ms)^```console\n(.*?)^```$")
_LAUNCHER = """#!/bin/sh
exec '{python}' -u -c 'from kpipe.codegen.cli import main; main()' "$@"
"""
_GIT = {
    **{f"GIT_{who}_{what}": "you" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


def as_run(text: str, folder: Path) -> str:
    """The page with the output of each command as it is now; times become `N ms`."""
    home = folder / "bin"
    home.mkdir()
    launcher = home / "kpipe"
    launcher.write_text(_LAUNCHER.format(python=sys.executable))
    launcher.chmod(0o755)
    env = {**os.environ, **_GIT, "PATH": f"{home}{os.pathsep}{os.environ['PATH']}"}
    env |= {"KPIPE_CACHE_DIR": str(folder / "cache"), "NO_COLOR": "1", "COLUMNS": "100"}
    work = folder / "work"
    work.mkdir()

    def block(match: re.Match[str]) -> str:
        nonlocal work
        lines = []
        for line in match[1].splitlines():
            if not line.startswith("$ "):
                continue  # what it printed before
            lines.append(line)
            if line.startswith("$ cd "):
                work = work / line.removeprefix("$ cd ")
                continue
            done = subprocess.run(
                ["bash", "-c", f"{line[2:]}"],
                cwd=work,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            lines += [shown.rstrip() for shown in done.stdout.splitlines()]
        body = re.sub(r" in \d+ ms$", " in N ms", "\n".join(lines), flags=re.MULTILINE)
        return f"```console\n{body}\n```"

    return _BLOCK.sub(block, text)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        PAGE.write_text(as_run(PAGE.read_text(), Path(scratch)))
