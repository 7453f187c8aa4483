"""Layers under decode context parallelism on several GPUs: right, steady, named, and how fast.

    python bench/ranks.py FOLDER --out DIR [--parts correctness,replays,...] [--transport auto]

FOLDER is a generated folder whose ranks exchange words (generated/dsa_dcp_d2 on two GPUs,
generated/dsa_dcp_d4 on four).  A rank is a process with a GPU of its own; one set of processes
runs all parts, so that a kernel is compiled once a rank.  A part that ends in an error takes its
processes along: the parts behind it get new ones.  DIR gets a JSON file a part, what the ranks
said, and summary.txt, which is printed as well.  Exit code 1 where a part found something wrong or
did not end, 4 without enough GPUs.

    correctness  whole layers against the oracle: eager, captured, 3 and 4 layers, q 1 and 4
    replays      1,000 replays with a rank late at random, every one with the same bits
    killed       a rank that is killed, or falls silent, in a step: the others say so and end
    times        microseconds a layer at 1, 4, 16 and 64 rows, 32K context
    collectives  the exchanges of a layer as NCCL collectives, for comparison
    crossover    one shot or two for the output's sum, by rows
    link         bandwidth of stores between GPUs, latency of a word

`--backend reference` tries correctness, replays and killed on the CPU, in small.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = ("correctness", "times", "replays", "crossover", "link", "collectives", "killed")
ON_CPU = ("correctness", "replays", "killed")
PART_S = 150.0
"""Seconds that ranks wait for each other, and that the processes of one part may take at most."""
LEAST_S = 20.0
"""With less time than that left nothing is started any more."""


def main() -> int:
    """All parts of a folder, or as one rank those that the command line names."""
    options = _parser().parse_args()
    if options.as_rank:
        return _as_rank(options)
    from kpipe.runtime.comm.device_processes import too_few
    from kpipe.runtime.generated_folder import load_layer

    layer_class = load_layer(options.folder)
    if not layer_class.CONTEXT_PARALLEL:
        print(f"error: the ranks of {layer_class.NAME} exchange nothing", file=sys.stderr)
        return 2
    cuda = options.backend == "cuda"
    if cuda and (found := _gpus()) < layer_class.RANKS:
        print(f"error: {too_few(layer_class.RANKS, found)}", file=sys.stderr)
        return 4
    wanted = options.parts.split(",") if options.parts else list(PARTS if cuda else ON_CPU)
    if unknown := [part for part in wanted if part not in (PARTS if cuda else ON_CPU)]:
        known = ", ".join(PARTS if cuda else ON_CPU)
        print(f"error: no part {', '.join(unknown)} here; parts: {known}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    clock = Clock(started + options.limit)
    parts = [part for part in PARTS if part in wanted]
    found_parts = _measured(options, layer_class.RANKS, parts, clock)
    text = _summary(layer_class.NAME, layer_class.RANKS, found_parts, time.monotonic() - started)
    (options.out / "summary.txt").write_text(text + "\n")
    print(text)
    return 0 if all(part.get("ok") for part in found_parts.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--parts", default="", metavar="P,P,...", help="default: all")
    parser.add_argument("--backend", choices=("cuda", "reference"), default="cuda")
    parser.add_argument("--transport", choices=("auto", "symmetric", "ipc"), default="auto")
    parser.add_argument(
        "--limit", type=float, default=340.0, metavar="S", help="seconds in all [default: 340]"
    )
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


# -- the driver ---------------------------------------------------------------------------------


class Clock:
    """The time that is left; `end` is on the monotonic clock."""

    def __init__(self, end: float) -> None:
        self._end = end

    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()


def _measured(
    options: argparse.Namespace, ranks: int, parts: list[str], clock: Clock
) -> dict[str, Any]:
    """What every part has found; parts behind one that did not end run in new processes."""
    for part in parts:
        (options.out / f"{part}.json").unlink(missing_ok=True)
    found: dict[str, Any] = {}
    waiting = [part for part in parts if part != "killed"]
    while waiting and clock.left() > LEAST_S:
        name = f"ranks-{waiting[0]}"
        _launch(options, ranks, waiting, name, min(clock.left(), PART_S * len(waiting)))
        for part in list(waiting):
            waiting.remove(part)
            found[part] = _read(options.out, part)
            if not found[part]["complete"]:
                found[part]["error"] = _said(options.out, name, ranks)
                _write(options.out, part, found[part])
                break
    found |= {part: {"complete": False, "ok": False, "error": ["no time"]} for part in waiting}
    if "killed" in parts:
        found["killed"] = _killed(options, ranks, clock)
    return found


def _killed(options: argparse.Namespace, ranks: int, clock: Clock) -> dict[str, Any]:
    """Every scenario in processes of its own, judged by what the ranks have left."""
    from rank_parts.killed import SCENARIOS, file_of, judged

    scenarios = []
    for scenario in SCENARIOS:
        if clock.left() < LEAST_S:
            return {"complete": False, "ok": False, "error": ["no time"]}
        for rank in range(ranks):
            file_of(options.out, scenario, rank).unlink(missing_ok=True)
        limit = min(clock.left(), PART_S)
        codes = _launch(options, ranks, [scenario], f"ranks-{scenario}", limit)
        scenarios.append(judged(options.out, scenario, ranks, codes))
    text = [
        f"{one['scenario']}: {'named by all others' if one['ok'] else '; '.join(one['wrong'])}"
        for one in scenarios
    ]
    found = {"complete": True, "ok": all(one["ok"] for one in scenarios), "scenarios": scenarios}
    _write(options.out, "killed", found)
    return found | {"text": text}


def _launch(
    options: argparse.Namespace, ranks: int, parts: Sequence[str], name: str, limit_s: float
) -> list[int]:
    """One set of processes; their exit codes."""
    from kpipe.runtime.comm.launcher import launch

    command = [str(Path(__file__).resolve()), options.folder, "--as-rank"]
    command += ["--out", str(options.out), "--parts", ",".join(parts)]
    command += ["--backend", options.backend, "--transport", options.transport]
    logs = [str(options.out / f"{name}-{rank}.log") for rank in range(ranks)]
    print(f"{', '.join(parts)} ...", file=sys.stderr, flush=True)
    ended = launch(command, ranks, timeout_s=limit_s, grace_s=20.0, output=logs)
    for one in ended:
        if one.code:
            print(one.text, file=sys.stderr, flush=True)
    return [one.code for one in ended]


def _read(out: Path, part: str) -> dict[str, Any]:
    path = out / f"{part}.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {"complete": False, "ok": False, **found}


def _write(out: Path, part: str, found: dict[str, Any]) -> None:
    (out / f"{part}.json").write_text(json.dumps({"part": part, **found}, indent=1) + "\n")


def _said(out: Path, name: str, ranks: int) -> list[str]:
    """The last lines of what every rank said."""
    found = []
    for rank in range(ranks):
        lines = (out / f"{name}-{rank}.log").read_text(errors="replace").strip().splitlines()
        found.append(f"rank {rank}: {' | '.join(lines[-3:]) or 'nothing'}")
    return found


def _summary(name: str, ranks: int, found: dict[str, Any], seconds: float) -> str:
    lines = [f"{name} on {ranks} ranks, {seconds:.0f} s"]
    for part, one in found.items():
        state = "ok" if one.get("ok") else "WRONG" if one["complete"] else "DID NOT END"
        took = f", {one['seconds']:.0f} s" if "seconds" in one else ""
        lines += ["", f"{part}: {state}{took}"]
        lines += [f"  {line}" for line in (*one.get("text", ()), *one.get("error", ()))]
    return "\n".join(lines)


# -- one rank -----------------------------------------------------------------------------------


def _as_rank(options: argparse.Namespace) -> int:
    """Runs the parts on this rank; an error ends it, and with it the group."""
    from kpipe.runtime.comm import multicast

    multicast.turn_off(os.environ)
    from rank_parts.killed import SCENARIOS, run_scenario

    from kpipe.runtime.comm.processes import Processes

    parts = options.parts.split(",")
    try:
        with Processes.join(exchange_s=PART_S) as processes:
            rank = _rank(options, processes)
            for part in parts:
                if part in SCENARIOS:
                    run_scenario(rank, part)
                    break
                _run_part(rank, part)
    except Exception:  # noqa: BLE001 - the driver reads it in the log
        traceback.print_exc()
        _end(1)
    _end(0)
    return 0


def _end(code: int) -> None:
    """Ends this process at once: a device that is lost may keep what comes at the end waiting."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_part(rank: Any, part: str) -> None:
    started = time.monotonic()
    found = importlib.import_module(f"rank_parts.{part}").run(rank)
    rank.barrier(f"behind {part}")
    seconds = round(time.monotonic() - started, 1)
    rank.save(part, {"complete": True, "seconds": seconds, "machine": _machine(rank), **found})
    print(f"{part}: {seconds} s", flush=True)


def _rank(options: argparse.Namespace, processes: Any) -> Any:
    from rank_parts.rank import Rank

    from kpipe.runtime.comm.device_processes import DeviceProcesses
    from kpipe.runtime.comm.host_processes import HostProcesses
    from kpipe.runtime.generated_folder import load_layer

    layer_class = load_layer(options.folder)
    if options.backend == "reference":
        arch = next(iter(layer_class.TABLE))[0]
        group: Any = HostProcesses(processes, timeout_s=30.0)
        return Rank(processes, group, layer_class, arch, options.out, True)
    from kpipe.runtime.host.launch import arch_of

    group = DeviceProcesses(processes, options.transport)
    print(f"mailboxes by {group.transport} {group.left_out}", flush=True)
    arch = arch_of(group.device)
    return Rank(processes, group, layer_class, arch, options.out, False)


def _machine(rank: Any) -> dict[str, Any]:
    import torch

    from kpipe.runtime.evidence import versions

    about: dict[str, Any] = {"ranks": rank.ranks, "arch": rank.arch, "versions": versions()}
    if rank.on_gpus:
        about |= {"gpu": torch.cuda.get_device_name(), "transport": rank.group.transport}
    return about


if __name__ == "__main__":
    sys.exit(main())
