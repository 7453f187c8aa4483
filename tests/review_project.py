"""A throw-away git project with the shipped pipelines, and reviews of edits to it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spec_project import edit, make_project

from kpipe.codegen.review.api import review
from kpipe.codegen.review.difference import difference
from kpipe.codegen.review.model import Difference, Review
from kpipe.codegen.review.side import Side, look

SETTINGS = '[tool.kpipe]\npipelines = ["pipelines/*.yaml"]\n'
TABLE = 'q1: {"1-4": front, "5-32": fork, "33-64": fork_split}, q4: {"4-8": front'
LATE = TABLE.replace('"1-4": front', '"1-4": late_front')
FORK_MAIN = (
    "fork:\n      main: [packed_gemm, fork side, query_norm, index_gemm, dsa_index, "
    "index_scores, topk_select, join side, core, value, o_proj]\n      side: [mla_query]"
)


def git(root: Path, *words: str) -> str:
    """Run git in a project, as nobody in particular."""
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    done = subprocess.run(
        ["git", "-C", str(root), *who, *words], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def commit(root: Path) -> str:
    """Commit the whole tree; returns the commit."""
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "state")
    return git(root, "rev-parse", "HEAD")


def make_repository(root: Path) -> Path:
    """The shipped pipelines in a git repository, with one commit on `main`."""
    make_project(root)
    for child in ("dsa_tp_ds", "dsa_tp_flashmla"):  # they would change along with dsa_tp
        (root / "pipelines" / f"{child}.yaml").unlink()
    (root / "pyproject.toml").write_text(SETTINGS)
    git(root, "init", "-q", "-b", "main")
    commit(root)
    return root


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """The working directory for a while; paths on the command line are relative to it."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def reviewed(root: Path, *specs: str, against: str = "main", everything: bool = False) -> Review:
    """The review of specs (default: dsa_tp) of a project against an old side."""
    named = specs or ("pipelines/dsa_tp.yaml",)
    with inside(root):
        return review(named, against, {}, all_of_project=everything)


def sides(root: Path, name: str, *edits: tuple[str, str]) -> tuple[Side, Side]:
    """A shipped spec before and after edits to its own file, without git and files."""
    make_project(root)
    with inside(root):
        before = look(f"pipelines/{name}.yaml", {})
        for old, new in edits:
            edit(root, f"{name}.yaml", old, new)
        return before, look(f"pipelines/{name}.yaml", {})


def edited(root: Path, name: str, *edits: tuple[str, str]) -> Difference:
    """What edits of a shipped spec do to its schedule."""
    return difference(*sides(root, name, *edits))
