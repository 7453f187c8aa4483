"""Programmatic dependent launch, the conservative schedule.

Until a schedule is proved, a launch carries the attribute only where everything that it does
ahead of its wait concerns static weights.  Early readers, ops that never wait and pollers are
launched plain; nobody releases early in front of an early reader.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kpipe.codegen.ops.contract import Contract, Release
from kpipe.codegen.plan.flags import active, polled_operands
from kpipe.codegen.plan.model import Pdl


@dataclass(frozen=True)
class Neighbour:
    """What the derivation needs to know of one launch."""

    name: str
    contract: Contract
    flags: Mapping[str, bool]
    weaken: str  # "", off, hold


def derive_pdl(
    launch: Neighbour,
    before: Neighbour | None,
    behind: Neighbour | None,
    *,
    heads_stream: bool,
    between_layers: str,
    spin_overlap: bool,
) -> Pdl:
    """Attribute and release of one launch.

    `before` and `behind` are its neighbours in the stream; None in front of the first and
    behind the last launch of a stream.  `heads_stream` is true for the first launch of a
    forked stream.
    """
    attribute, why = _attribute(
        launch, before, heads_stream, between_layers=between_layers, spin_overlap=spin_overlap
    )
    release, why_release = _release(launch, behind, spin_overlap)
    return Pdl(attribute, release, why, why_release)


def _attribute(
    launch: Neighbour,
    before: Neighbour | None,
    heads_stream: bool,
    *,
    between_layers: str,
    spin_overlap: bool,
) -> tuple[bool, str]:
    contract = launch.contract
    polled = polled_operands(contract, launch.flags)
    if launch.weaken == "off":
        return False, "plain: the spec says so"
    if not contract.waits:
        return False, "plain: it never waits"
    if early := _early(launch):
        return False, f"plain: reads {_names(early)} before its wait"
    if polled and not spin_overlap:
        return False, f"plain: polls {_names(polled)}"
    if heads_stream:
        return False, "plain: first of a forked stream"
    if before is None and between_layers != "waits":
        return False, f"plain: between_layers is {between_layers}"
    return True, "pdl"


def _release(launch: Neighbour, behind: Neighbour | None, spin_overlap: bool) -> tuple[bool, str]:
    contract = launch.contract
    polled = polled_operands(contract, launch.flags)
    if contract.release is Release.NEVER:
        return False, "no release"
    if contract.release is Release.LIBRARY:
        return False, "release is the library's"
    if launch.weaken in ("hold", "off"):
        return False, "held: the spec says so"
    if polled and not spin_overlap:
        return False, f"held: polls {_names(polled)}"
    if behind is not None and not behind.contract.waits:
        return False, f"held: {behind.name} never waits"
    if behind is not None and (early := _early(behind)):
        return False, f"held: {behind.name} reads {_names(early)} before its wait"
    return True, contract.release.value


def _early(launch: Neighbour) -> tuple[str, ...]:
    """What the launch touches before its wait, operands that it lacks here left out."""
    operands = (launch.contract.operand(name) for name in launch.contract.early_reads)
    return tuple(o.name for o in operands if o is not None and active(o, launch.flags))


def _names(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)
