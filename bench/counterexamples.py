"""Counterexamples of the mailbox explorer, for the layer's own kernels to run into.

    python bench/counterexamples.py P [--build] [--spec pipelines/dsa_dcp_d2.yaml]       here
    python -m kpipe.runtime.counterexamples P --out F                  on the machine with the GPU

Protocols of the spec's plans are changed as `CHANGES` says: a mailbox that nothing re-arms, a
single parity where no exchange ends the layer, a wait left out.  The explorer must refuse each
change and prove its repair.  Out of the counterexample comes who has to be late, and where.
With --build the kernels of these plans come into P as well, and no process over there compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "proof" / "mailbox")]

from mailbox_protocols import without, without_rearm  # noqa: E402

from kpipe.codegen.plan.api import plan_pipeline  # noqa: E402
from kpipe.codegen.plan.model import PipelinePlan, StepPlan  # noqa: E402
from kpipe.codegen.proof.mailbox.explorer import bounds_to_check, explore  # noqa: E402
from kpipe.codegen.proof.mailbox.ladder import ladder  # noqa: E402
from kpipe.codegen.proof.mailbox.protocol import Act, Protocol, protocol_of  # noqa: E402
from kpipe.codegen.proof.mailbox.unrolled import Bounds  # noqa: E402
from kpipe.codegen.proof.mailbox.verdict import Event, Verdict  # noqa: E402

PLAN = "kpipe.counterexamples/1"
TRIALS, BUILD = "trials.json", "build"  # what lies in the folder that is written
RANKS = 2
ARCH, Q = "sm_90a", 1
CLOSING = ("o_proj", "o_reduce")  # the exchange that ends a layer


@dataclass(frozen=True)
class Change:
    """What is done to the protocol of the plan of `rows` rows: the fault, and what stays when it
    is repaired (`closing`: the exchange that ends the layer is left out both times).

    `apart`: it takes streams that run apart.  Threads of the CPU launch in host order, and there
    another exchange keeps the ranks together.
    """

    id: str
    rows: int
    kind: str  # what the explorer has to say
    unarmed: tuple[str, ...] = ()
    one_parity: bool = False
    closing: bool = False
    left_out: tuple[str, ...] = ()
    apart: bool = False


CHANGES = (
    # In line it shows nowhere: nobody has all candidates before the late query has come.
    Change("query not re-armed", 8, "never_rearmed", unarmed=("q_mail",)),
    Change("candidates not re-armed", 4, "never_rearmed", unarmed=("candidates",)),
    Change("partials not re-armed", 4, "never_rearmed", unarmed=("partial_mail", "lse_mail")),
    Change("outputs not re-armed", 4, "never_rearmed", unarmed=("o_mail",)),
    Change("sums not re-armed", 64, "never_rearmed", unarmed=("o_gather",)),
    Change("one parity in line", 4, "reused", one_parity=True, closing=True),
    Change("one parity forked", 8, "reused", one_parity=True, closing=True, apart=True),
    Change("query not awaited", 8, "unarrived", left_out=("query_wait",)),
)


def plan_for(pipeline: PipelinePlan, rows: int) -> StepPlan:
    """The plan of so many rows."""
    return next(p for p in pipeline.plans if (p.arch, p.q, p.rows) == (ARCH, Q, rows))


def trials_of(spec: str) -> list[dict[str, Any]]:
    """Every change as a trial; ValueError where the explorer does not say what it must."""
    pipeline = plan_pipeline(spec)
    return [_trial(pipeline, change) for change in CHANGES]


def _trial(pipeline: PipelinePlan, change: Change) -> dict[str, Any]:
    protocol = protocol_of(plan_for(pipeline, change.rows), pipeline)
    base = without(protocol, *CLOSING) if change.closing else protocol
    changed = without(base, *change.left_out)
    for box in change.unarmed:
        changed = without_rearm(changed, box)
    for box in base.boxes if change.one_parity else ():
        changed = changed.with_parities(box.name, 1)
    bounds = bounds_to_check(changed, RANKS)[0]
    verdict = explore(changed, bounds)
    if verdict.kind != change.kind:
        raise ValueError(f"{change.id}: {verdict.kind or 'proved'}, not {change.kind}")
    repaired = explore(base, bounds_to_check(base, RANKS)[0])
    if not repaired.proved:
        raise ValueError(f"{change.id}, repaired: {repaired.what}")
    return {
        "id": change.id,
        "arch": ARCH,
        "q": Q,
        "rows": change.rows,
        "layers": bounds.layers,
        "control": _fault(protocol, change, repaired=True),
        "fault": _fault(protocol, change, repaired=False),
        "late": late(base, bounds, verdict),
        "expects": "timeout" if verdict.kind == "reused" else "wrong",
        "apart": change.apart,
        "what": verdict.what,
        "ladder": ladder(verdict, RANKS).splitlines(),
    }


def _fault(protocol: Protocol, change: Change, *, repaired: bool) -> dict[str, Any]:
    """The change as the runtime puts it into prepared layers."""
    given = [CLOSING[-1]] if change.closing else []
    left_out = [name for name in CLOSING if name not in given] if change.closing else []
    if repaired:
        return {"parities": {}, "unarmed": [], "left_out": left_out, "given": given}
    boxes = [box.name for box in protocol.boxes] if change.one_parity else []
    return {
        "parities": dict.fromkeys(boxes, 1),
        "unarmed": [_unarmed(protocol, box) for box in change.unarmed],
        "left_out": [*left_out, *change.left_out],
        "given": given,
    }


def _unarmed(protocol: Protocol, box: str) -> dict[str, Any]:
    """Words can be saved ahead of a re-arm whose op does not itself wait for them."""
    op = _op_that(protocol, Act.REARM, box)
    polled = any(
        use.act is Act.POLL and use.box == box
        for one in protocol.ops
        if one.name == op
        for use in one.uses
    )
    return {"box": box, "op": op, "saved": not polled}


def late(base: Protocol, bounds: Bounds, verdict: Verdict) -> dict[str, Any]:
    """Who is late where, so that the counterexample's last step goes wrong for others to see.

    A word that is overwritten because nothing re-arms it: the rank that overwrites, ahead of that
    launch; until then others take the old word for the new one.  A word that is overwritten before
    it is re-armed: its reader's re-arm.  A word that is read before it has come: the rank that has
    not published it yet, ahead of that launch.
    """
    assert verdict.counterexample is not None
    last = verdict.counterexample[-1]
    layer = last.step * bounds.layers + last.layer
    if verdict.kind == "never_rearmed":
        return {"rank": last.rank, "layer": layer, "op": last.op, "box": ""}
    if verdict.kind == "reused":
        unread = next(_layers_back(verdict.counterexample, last, bounds))
        op = _op_that(base, Act.REARM, last.box)
        return {"rank": last.peer, "layer": unread, "op": op, "box": last.box}
    place = ("publish", last.box, last.step, last.layer, last.rank)
    came = {
        event.rank
        for event in verdict.counterexample
        if (event.act, event.box, event.step, event.layer, event.peer) == place
    }
    missing = min(set(range(RANKS)) - came - {last.rank})
    op = _op_that(base, Act.PUBLISH, last.box)
    return {"rank": missing, "layer": layer, "op": op, "box": ""}


def _layers_back(events: tuple[Event, ...], last: Event, bounds: Bounds) -> Iterator[int]:
    """Layers, latest first, whose word the last publish overwrites."""
    for event in reversed(events[:-1]):
        if (event.rank, event.act, event.box, event.parity, event.peer) == (
            last.rank, last.act, last.box, last.parity, last.peer,
        ):  # fmt: skip
            yield event.step * bounds.layers + event.layer


def _op_that(protocol: Protocol, act: Act, box: str) -> str:
    """The op that does something to a mailbox."""
    return next(
        op.name for op in protocol.ops for use in op.uses if (use.act, use.box) == (act, box)
    )


def build_kernels(folder: Path, trials: Sequence[dict[str, Any]], out: Path) -> None:
    """Objects of what these trials launch, for ranks that share a GPU and run at once.

    RuntimeError where a kernel does not compile.
    """
    from kpipe.runtime.aot.builder import build
    from kpipe.runtime.aot.toolchain import dsl_version
    from kpipe.runtime.aot.wanted import MULTIPROCESSORS, FolderKernels, Place
    from kpipe.runtime.comm.device_ranks import room_at_once
    from kpipe.runtime.generated_folder import layer_of_step, load_layer

    layer_class = load_layer(folder)
    sizes = dict.fromkeys(one["rows"] for one in trials)
    layers = [layer_of_step(layer_class, ARCH, rows, Q) for rows in sizes]
    calls = [call for layer in layers for call in layer.calls()]
    room = room_at_once(RANKS, MULTIPROCESSORS[ARCH])
    kernels = FolderKernels(layer_class, folder, ARCH, dsl_version())
    wanted = kernels.wanted((), [Place(rank, *room) for rank in range(RANKS)], calls)
    whole = [one for one in wanted if one.flags.get("half", "whole") == "whole"]

    def said(what: str, number: int, total: int, seconds: float) -> None:
        print(f"{number}/{total}  {what}  {seconds:.1f} s", file=sys.stderr)

    outcome = build(kernels, whole, out, len(os.sched_getaffinity(0)), said)
    if outcome.failed:
        raise RuntimeError("; ".join(f"{what}: {error}" for what, error in outcome.failed))
    print(f"{len(outcome.made)} kernels, {outcome.bytes / 2**20:.1f} MiB", file=sys.stderr)


def main() -> int:
    """See the top of the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("place", type=Path, metavar="P", help="folder to write")
    parser.add_argument("--spec", default=str(ROOT / "pipelines" / "dsa_dcp_d2.yaml"))
    parser.add_argument("--build", action="store_true", help="with kernels, of generated/")
    options = parser.parse_args()
    trials, pipeline = trials_of(options.spec), Path(options.spec).stem
    document = {"schema": PLAN, "pipeline": pipeline, "trials": trials}
    options.place.mkdir(parents=True, exist_ok=True)
    (options.place / TRIALS).write_text(json.dumps(document, indent=1) + "\n")
    shutil.rmtree(options.place / BUILD, ignore_errors=True)
    if options.build:
        build_kernels(ROOT / "generated" / pipeline, trials, options.place / BUILD)
    for trial in trials:
        where = trial["late"]
        print(f"{trial['id']}: {trial['what']}", file=sys.stderr)
        what = f"{where['op']} re-arming {where['box']}" if where["box"] else where["op"]
        print(f"  late: rank {where['rank']}, layer {where['layer']}, {what}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
