"""`kpipe build` on a terminal: a bar that follows the command, and what it says."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kpipe.codegen.cli import main
from kpipe.codegen.commands import build

SCRIPT = """\
import json, sys
assert sys.argv[-1] == "--events" and sys.argv[2] == "--arch=sm_90a", sys.argv
print(json.dumps({"number": 1, "what": "rms_norm pdl=true", "total": 2, "seconds": 1.0}))
print(json.dumps({"line": "error: [o_proj] does not compile"}))
print(json.dumps({"result": "1 compiled"}))
sys.exit(1)
"""


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_follows_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    command = [sys.executable, str(script)]
    assert build.run(str(tmp_path), command, ["--arch=sm_90a"], "never") == 1
    assert "1/2  rms_norm pdl=true" in stderr.getvalue()
    assert "error: [o_proj] does not compile" in stderr.getvalue()
    assert capsys.readouterr().out == "1 compiled\n"


def test_options_reach_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Done:
        returncode = 3

    def run(words: list[str], check: bool) -> Done:
        seen.append(words)
        return Done()

    monkeypatch.setattr("subprocess.run", run)
    options = ["--arch", "sm_90a", "--only", "o_proj", "--jobs", "3", "--check", "--ranks", "0,1"]
    result = CliRunner().invoke(main, ["build", str(tmp_path), *options])
    assert (result.exit_code, result.output) == (3, "")
    (words,) = seen
    assert words[3:5] == ["-m", "kpipe.runtime.build"] and Path(words[5]).name == tmp_path.name
    assert words[6:] == [
        "--arch=sm_90a", "--only=o_proj", "--jobs=3", "--ranks=0,1", "--check",
    ]  # fmt: skip
