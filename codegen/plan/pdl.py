"""Programmatic dependent launch: the strongest overlap that an op and the spec allow by themselves.

What neighbours allow is not decided here: the proof tries this schedule and takes back what it
cannot prove (`proof/synthesis.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kpipe.codegen.ops.contract import Contract, Kind, Release
from kpipe.codegen.plan.flags import active, polled_operands
from kpipe.codegen.plan.model import Pdl


@dataclass(frozen=True)
class Candidate:
    """What the decision needs to know of one launch."""

    contract: Contract
    flags: Mapping[str, bool]
    weaken: str  # "", off, hold: the spec may weaken an overlap, never force it


def strongest(launch: Candidate, *, spin_overlap: bool) -> Pdl:
    """The attribute and the early release that nothing about the launch itself forbids.

    An op that never waits gets no attribute: behind it no later wait would cover what came
    before.  Nor does one that reads early what another op may have written: its predecessor would
    have to hold its release, and a hold rests on a reading that no document promises.  What the
    engine hands in is written ahead of the layer; the proof says whether that is early enough.  A
    poller overlaps its neighbours only where `environment.spin_overlap` allows it.
    """
    polled = polled_operands(launch.contract, launch.flags)
    spins = f"polls {_names(polled)}" if polled and not spin_overlap else ""
    attribute, why = True, "pdl"
    if launch.weaken == "off":
        attribute, why = False, "plain: the spec says so"
    elif not launch.contract.waits:
        attribute, why = False, "plain: it never waits"
    elif early := _early(launch):
        attribute, why = False, f"plain: reads {_names(early)} before its wait"
    elif spins:
        attribute, why = False, f"plain: {spins}"
    release, why_release = True, launch.contract.release.value
    if launch.contract.release is Release.NEVER:
        release, why_release = False, "no release"
    elif launch.contract.release is Release.SOME_BLOCKS:
        release, why_release = False, "released by some blocks only, so at the last exit"
    elif launch.contract.release is Release.LIBRARY:
        release, why_release = False, "release is the library's"
    elif launch.weaken:
        release, why_release = False, "held: the spec says so"
    elif spins:
        release, why_release = False, f"held: {spins}"
    return Pdl(attribute, release, why, why_release)


def _early(launch: Candidate) -> tuple[str, ...]:
    """What the launch touches before its wait, operands that it lacks here left out, and those
    that the engine hands in."""
    operands = (launch.contract.operand(name) for name in launch.contract.early_reads)
    return tuple(
        o.name
        for o in operands
        if o is not None and o.kind is not Kind.STEP and active(o, launch.flags)
    )


def _names(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)
