"""Ranks that are processes: they agree, or every one says why not; nobody waits for the dead."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from layer_factory import LayerFactory

from kpipe.runtime.comm.launcher import launch

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    factory = LayerFactory(tmp_path_factory.mktemp("processes"))
    factory.dcp(2)
    return factory.root / "generated" / "dcp_2_i1"


def run(part: str, *folders: Path) -> tuple[list[int], list[dict[str, list[str]]], str]:
    """Exit codes of two ranks, what they found (nothing where there is no file), what they said."""
    out = folders[-1]
    logs = [str(out / f"rank-{rank}.log") for rank in range(2)]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    command = [PROGRAM, part, *map(str, folders)]
    ended = launch(command, 2, environment={"PYTHONPATH": path}, timeout_s=120, output=logs)
    files = [out / f"rank-{rank}.json" for rank in range(2)]
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return [one.code for one in ended], found, "".join(Path(log).read_text() for log in logs)


def test_what_is_not_alike_is_said_on_every_rank(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "generated" / folder.name
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("__pycache__"))
    layer, ops = other / "layer.py", other / "ops.py"
    layer.write_text(
        layer.read_text().replace('3: "_wait_index_gemm', '3: "_fork_sparse_decode",  # "', 1)
    )
    ops.write_text(ops.read_text().replace("TOP_K = 16", "TOP_K = 12"))
    codes, found, said = run("unlike", folder, other, tmp_path)
    assert codes == [0, 0], said
    assert found[0]["prepare"] == found[1]["prepare"]
    kind, text = found[0]["prepare"]
    assert kind == "LayerError"
    assert re.fullmatch(
        r"dcp_2_i1: the ranks are not prepared alike: method of 3 rows, q 1, sm_90a is "
        r"_wait_index_gemm_dsa_index_sparse_decode on rank 0, _fork_sparse_decode on rank 1; "
        r"op topk_local is .*'top_k': '16'.* on rank 0, .*'top_k': '12'.* on rank 1; "
        r"op topk_merge is .*; file layer.py is [0-9a-f]{12} on rank 0, [0-9a-f]{12} on rank 1; "
        r"file ops.py is .*",
        text,
    )
    assert found[0]["mailbox"] == found[1]["mailbox"]
    kind, text, *_ = found[0]["mailbox"]
    assert kind == "MailboxError"
    assert "mailbox other: rank 0 declares" in text and "shape=(2, 4, 4)" in text
    places = "the ranks have come to different places: rank 0 at `topic 0`, rank 1 at `topic 1`"
    assert [one["topic"] for one in found] == [["RankAborted", places]] * 2
    left_out = "broken, rank 0: RuntimeError: no such memory"
    flags = str([True] * 6)
    assert [one["device"] for one in found] == [
        ["files", left_out, flags, "[8]"],
        ["files", left_out, flags, "[7]"],
    ]


def test_a_rank_that_is_killed_in_a_step_is_named(folder: Path, tmp_path: Path) -> None:
    codes, (found, nothing), said = run("killed", folder, tmp_path)
    assert codes == [0, -9], said
    assert nothing == {}
    kind, text, mailbox, stage = found["step"]
    assert (kind, mailbox, stage) == ("MailboxTimeout", "candidates", "topk_merge")
    assert re.fullmatch(
        r"mailbox candidates, parity 0, stage topk_merge, rank 0: rank 1 has not written (.*); "
        r"first missing word \(1, 0, 0, 0\), \d+ of \d+ missing; expected anything but 0xFFFFFFFF, "
        r"saw 0xFFFFFFFF 0xFFFFFFFF",
        text,
    )
    assert "(the process of rank 1 is no more)" in text
    assert found["meeting"] == [
        "RankAborted",
        "rank 0 stopped at `behind the step`: the process of rank 1 is no more",
    ]


def test_a_rank_that_raises_in_a_step_is_named(folder: Path, tmp_path: Path) -> None:
    codes, found, said = run("failed", folder, tmp_path)
    assert codes == [0, 0], said
    assert [one["step"] for one in found] == [
        ["RankAborted", "rank 0 stopped: rank 1 failed with ValueError: broken on purpose"],
        ["ValueError", "broken on purpose"],
    ]
