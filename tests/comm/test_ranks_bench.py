"""bench/ranks.py without GPUs: what its driver makes of parts that fail, what its parts launch."""

from __future__ import annotations

import importlib
import json
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.host.compile import compile_kernel, ptx_of
from kpipe.runtime.recording import recorded

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench():
    """The script, with the folder that it lies in on the path as when it is run."""
    sys.path.insert(0, str(ROOT / "bench"))
    try:
        yield importlib.import_module("ranks")
    finally:
        sys.path.remove(str(ROOT / "bench"))


def part(name: str):
    return importlib.import_module(f"rank_parts.{name}")


def test_every_part_can_be_imported_and_run(bench):
    for name in bench.PARTS:
        assert callable(getattr(part(name), "run_scenario" if name == "killed" else "run"))
        assert f"\n    {name} " in bench.__doc__


def measured(bench, monkeypatch, tmp_path, parts, ends, left=1000.0):
    """The driver's results where processes write the parts named in `ends`, then end."""
    launched = []

    def launch(options, ranks, waiting, name, limit_s):
        launched.append((list(waiting), limit_s))
        for rank in range(ranks):
            (options.out / f"{name}-{rank}.log").write_text(f"said\nby {rank}\n")
        for one in waiting:
            if one not in ends:
                break
            bench._write(options.out, one, {"complete": True, "ok": True})
        return [0] * ranks

    monkeypatch.setattr(bench, "_launch", launch)
    clock = bench.Clock(time.monotonic() + left)
    return bench._measured(Namespace(out=tmp_path), 2, parts, clock), launched


def test_a_part_that_does_not_end_costs_no_other(bench, monkeypatch, tmp_path):
    parts = ["correctness", "times", "replays", "link"]
    ends = {"correctness", "replays", "link"}
    found, launched = measured(bench, monkeypatch, tmp_path, parts, ends)
    assert [waiting for waiting, _ in launched] == [parts, ["replays", "link"]]
    assert {name: one["complete"] for name, one in found.items()} == {
        name: name in ends for name in parts
    }
    assert found["times"]["error"] == ["rank 0: said | by 0", "rank 1: said | by 1"]
    assert json.loads((tmp_path / "times.json").read_text())["error"] == found["times"]["error"]
    text = bench._summary("dsa", 2, found, 12.0)
    assert "correctness: ok" in text and "times: DID NOT END\n  rank 0: said | by 0" in text


def test_without_time_nothing_is_started(bench, monkeypatch, tmp_path):
    found, launched = measured(bench, monkeypatch, tmp_path, ["times", "killed"], {"times"}, 5.0)
    assert launched == []
    assert [one["error"] for one in found.values()] == [["no time"], ["no time"]]


def test_what_was_found_before_does_not_count(bench, monkeypatch, tmp_path):
    bench._write(tmp_path, "times", {"complete": True, "ok": True})
    found, _ = measured(bench, monkeypatch, tmp_path, ["times"], set())
    assert not found["times"]["complete"]


def test_survivors_have_to_name_what_happened(bench, tmp_path):
    killed = part("killed")

    def judged(scenario, codes, *said):
        for rank, text in enumerate(said):
            killed.file_of(tmp_path, scenario, rank).write_text(text + "\n")
        return killed.judged(tmp_path, scenario, len(said), codes)

    named = "MailboxTimeout: mailbox candidates, rank 0: rank 2 has not written"
    heard = "RankAborted: rank 1 stopped: rank 0 failed with MailboxTimeout: x"
    good = [0, 0, -signal.SIGKILL]
    assert judged("killed", good, named, heard, "")["ok"]
    wrong = judged("killed", good, "AcceleratorError: launch failure", heard, "")
    assert wrong["wrong"] == ["rank 0 said: AcceleratorError: launch failure"]
    assert judged("killed", [0, 0, 1], named, heard, "")["wrong"] == ["rank 2 ended with 1"]
    assert judged("silent", [0, 0, 0], named, heard, "nothing was raised")["wrong"] == [
        "rank 2 said: nothing was raised"
    ]
    assert judged("silent", [0, 0, 0], named, heard, heard)["ok"]


@pytest.mark.parametrize("two_shot", [False, True])
def test_the_crossover_launches_what_the_layer_launches(bench, two_shot):
    """Both forms, with the operands and the flags of the generated methods."""
    layer_class = load_layer(ROOT / "generated" / "dsa_dcp_d2")
    method = layer_class.TABLE[("sm_90a", 1)][64 if two_shot else 32]
    wanted = [(call.op, dict(call.flags)) for call in recorded(layer_class(), method)][-2:]
    assert [op for op, _ in wanted] == ["o_proj", "o_reduce"]
    found = []

    def launch(name):
        def record(*operands, **named):
            flags = {n: v for n, v in named.items() if isinstance(v, bool)}
            found.append((name, flags))
            assert all(value is not None for value in (*operands, *named.values()))

        return record

    at = SimpleNamespace(gated="gated", o_mail="o_mail", o_gather="o_gather")
    layer = SimpleNamespace(
        o_proj=launch("o_proj"), o_reduce=launch("o_reduce"), views=lambda rows: at
    )
    one = SimpleNamespace(layer=layer, step=SimpleNamespace(out=list(range(64))))
    part("crossover")._launches(one, 8, two_shot)()
    assert found == wanted
    assert layer._views is at


def test_ping_pong_compiles_and_gives_up(bench):
    ping = part("ping_kernel")
    for first in (True, False):
        kernel = compile_kernel(ping.Ping(first), ping.operands(), "sm_90a", keep_ptx=True)
        text = ptx_of(kernel)
        assert "trap;" in text and "multimem" not in text
        store, poll = text.index("st.relaxed.sys.global.b32"), text.index("ld.relaxed.sys")
        assert (store < poll) == first


def test_collectives_are_those_of_the_mailboxes(bench):
    """One for each mailbox but o_gather, whose work the all-reduce does, with as many bytes."""
    import torch

    layer_class = load_layer(ROOT / "generated" / "dsa_dcp_d2")
    sent: list[int] = []
    collectives = part("collectives")
    names = ("all_gather_into_tensor", "all_to_all_single", "all_reduce")
    stand_ins = {
        "all_gather_into_tensor": lambda whole, mine, group: sent.append(whole.nbytes),
        "all_to_all_single": lambda come, out, group: sent.append(come.nbytes),
        "all_reduce": lambda out, group: sent.append(out.nbytes * 2),
    }
    real = {name: getattr(collectives.dist, name) for name in names}
    try:
        for name in names:
            setattr(collectives.dist, name, stand_ins[name])
        rank = SimpleNamespace(layer_class=layer_class, ranks=2, device=torch.device("cpu"))
        for call in collectives.exchanges(rank, 64, None).values():
            call()
    finally:
        for name in names:
            setattr(collectives.dist, name, real[name])
    boxes = layer_class.MEMORY.mailboxes
    wanted = [boxes[n].armed_words().nbytes for n in ("q_mail", "candidates", "partial_mail")]
    wanted += [boxes[n].armed_words().nbytes for n in ("lse_mail", "o_mail")]
    assert sent == wanted
