"""Processes of ranks: what they are told, and that none outlives a launch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from kpipe.runtime.comm import multicast
from kpipe.runtime.comm.launcher import Ended, launch, started_here
from kpipe.runtime.comm.processes import Processes
from kpipe.runtime.metadata import LayerError

TELL = """
import json, os, sys
found = {**os.environ, "files": os.listdir(os.environ["TMPDIR"])}
print(json.dumps(found))
sys.exit(int(os.environ["RANK"]))
"""
HANG = """
import os, signal, sys
if os.environ["RANK"] == "0":
    sys.exit(3)
signal.pause()
"""


def logs(folder: Path) -> list[str]:
    return [str(folder / f"{rank}.log") for rank in range(2)]


def test_ranks_are_told_who_they_are_and_that_multicast_is_off(tmp_path: Path) -> None:
    ended = launch(["-c", TELL], 2, environment={"MORE": "x"}, output=logs(tmp_path))
    assert [(one.rank, one.code, one.stopped) for one in ended] == [(0, 0, False), (1, 1, False)]
    found = [json.loads(Path(log).read_text()) for log in logs(tmp_path)]
    for rank, told in enumerate(found):
        assert (told["RANK"], told["LOCAL_RANK"], told["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert {name: told[name] for name in multicast.OFF} == multicast.OFF
        assert told["MORE"] == "x" and not Path(told["TMPDIR"]).exists()
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]


def test_a_rank_that_hangs_behind_another_one_is_stopped(tmp_path: Path) -> None:
    ended = launch(["-c", HANG], 2, grace_s=0.0, output=logs(tmp_path))
    assert ended == [Ended(0, 3), Ended(1, -signal.SIGKILL, True)]
    assert [one.text for one in ended] == [
        "rank 0 ended with code 3",
        "rank 1 ended by signal 9, stopped because it did not end by itself",
    ]


def test_all_are_stopped_when_time_is_up(tmp_path: Path) -> None:
    ended = launch(["-c", "import signal; signal.pause()"], 2, timeout_s=0.0, output=logs(tmp_path))
    assert [(one.code, one.stopped) for one in ended] == [(-signal.SIGKILL, True)] * 2


def test_multicast_is_turned_off_where_nothing_is_said_and_refused_where_it_is_wanted() -> None:
    environment = {"NCCL_NVLS_ENABLE": "0"}
    multicast.turn_off(environment)
    assert environment == multicast.OFF
    with pytest.raises(LayerError, match="TORCH_SYMM_MEM_DISABLE_MULTICAST is '0': .* set it to 1"):
        multicast.turn_off({"TORCH_SYMM_MEM_DISABLE_MULTICAST": "0"})


def test_a_process_that_is_no_rank_is_told_how_to_become_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert not started_here()
    text = "RANK, WORLD_SIZE, MASTER_ADDR not set; start it with torchrun --nproc-per-node N"
    with pytest.raises(LayerError, match=text):
        Processes.join()
    assert "RANK" not in os.environ


def test_ranks_that_never_come_are_counted_against_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    values = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    values |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LayerError, match=r"^rank 1: not all of 2 ranks have joined within 0.1 s: "):
        Processes.join(join_s=0.1)
