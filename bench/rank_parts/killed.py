"""A rank that is killed, or falls silent, in the middle of a step: what the others say of it.

This part ends in errors, so every scenario has processes of its own; the driver reads the files
that the ranks leave.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from rank_parts.rank import Rank

SCENARIOS = ("killed", "silent")
ROWS, CONTEXT = 4, 4096


def file_of(out: Path, scenario: str, rank: int) -> Path:
    """Where a rank leaves what it has seen."""
    return out / f"{scenario}-rank-{rank}.txt"


def run_scenario(rank: Rank, scenario: str) -> None:
    """The last rank goes after two good steps; what every rank raises stands in its file.

    Killed: in the middle of its launches.  Silent: it launches no step, and waits for the others.
    """
    (one,) = rank.layers(ROWS, 1, 200 if rank.quick else CONTEXT, 1)
    if rank.on_gpus:
        rank.warm([one.run])
    for _ in range(2):
        rank.barrier("a good step")
        rank.group.run(lambda comm: one.run())
    rank.barrier("the last step")
    last = rank.number == rank.ranks - 1
    if last and scenario == "killed":

        def end(*operands: Any, **named: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        one.layer.topk_local = end  # type: ignore[attr-defined]
    try:
        if not (last and scenario == "silent"):
            rank.group.run(lambda comm: one.run())
        rank.synchronize()
        rank.barrier("behind the step")
        said = "nothing was raised"
    except Exception as error:  # noqa: BLE001 - it is what the driver reads
        said = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        rank.processes.fail(error)
    file_of(rank.out, scenario, rank.number).write_text(said + "\n")


def judged(out: Path, scenario: str, ranks: int, codes: list[int]) -> dict[str, Any]:
    """What the files of a scenario say, and whether every survivor names what happened."""
    last = ranks - 1
    said = {}
    for rank in range(ranks):
        path = file_of(out, scenario, rank)
        said[rank] = path.read_text().strip() if path.is_file() else ""
    wrong = []
    for rank in range(last):
        named = f"rank {last} has not written" in said[rank] or "no more" in said[rank]
        # Of several survivors the first one's words are what the others stop at.
        heard = any(f"rank {other} failed with" in said[rank] for other in range(last))
        if not (named or heard) or not said[rank].startswith(("MailboxTimeout", "RankAborted")):
            wrong.append(f"rank {rank} said: {said[rank] or 'nothing'}")
    if scenario == "killed" and codes[last] != -signal.SIGKILL:
        wrong.append(f"rank {last} ended with {codes[last]}")
    if scenario == "silent" and "RankAborted" not in said[last]:
        wrong.append(f"rank {last} said: {said[last] or 'nothing'}")
    return {"scenario": scenario, "ok": not wrong, "codes": codes, "said": said, "wrong": wrong}
