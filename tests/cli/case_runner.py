"""Runs one folder of tests/cases: a command line on a temporary copy, and what it printed."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from click.testing import CliRunner

CASES = Path(__file__).resolve().parents[1] / "cases"
BASE = CASES / "_base"
EXPECTED = ("stdout", "stderr", "exit")


@dataclass(frozen=True)
class Outcome:
    """Exactly what a command printed, and its exit code."""

    stdout: str
    stderr: str
    exit: str


def case_folders() -> list[Path]:
    """Every case, sorted."""
    return sorted(path for path in CASES.iterdir() if (path / "args").is_file())


@contextlib.contextmanager
def stub_renderer() -> Iterator[None]:
    """A renderer of two files, so that the cases do not move with the templates."""
    module = types.ModuleType("kpipe.codegen.render.api")

    def render_pipeline(proved, template_folders):  # noqa: ANN001, ANN202
        plan = proved.pipeline
        steps = "".join(f"{s.arch} {s.q} {s.rows} {s.mode}\n" for s in plan.plans)
        return {"layer.py": steps, "kernels/rms_norm.py": f"HEADS = {plan.dims['heads']}\n"}

    module.render_pipeline = render_pipeline
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[module.__name__]
        else:
            sys.modules[module.__name__] = before


def run_case(folder: Path, workspace: Path) -> Outcome:
    """Run every line of `args` in a copy of the base and the case; the last one's outcome."""
    from kpipe.codegen.cli import main

    shutil.copytree(BASE, workspace, dirs_exist_ok=True)
    (workspace / "kpipe.toml").touch()
    skipped = shutil.ignore_patterns("args", *EXPECTED)
    shutil.copytree(folder, workspace, dirs_exist_ok=True, ignore=skipped)
    before = os.getcwd()
    os.chdir(workspace)
    try:
        with stub_renderer():
            for line in (folder / "args").read_text().splitlines():
                result = CliRunner().invoke(main, shlex.split(line), env={"KPIPE_CACHE_DIR": None})
    finally:
        os.chdir(before)
    took = re.compile(r" in \d+ ms$", re.MULTILINE)  # the only thing that differs between runs
    return Outcome(result.stdout, took.sub(" in N ms", result.stderr), f"{result.exit_code}\n")
