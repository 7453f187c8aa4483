"""Where accesses lie relative to their kernel's trigger: what contracts do not say.

The trigger cuts the program order of a kernel's accesses.  One at entry has none but prologue
accesses in front of it, one behind the wait has all of them, and body accesses up to the cut.
"""

from __future__ import annotations

import random

from kpipe.codegen.proof.program import Copy, Kernel, Program

Site = tuple[int, int]  # launch, position among its accesses


def program_order(node: Kernel | Copy) -> list[int]:
    """Positions of a node's accesses in the order of its code: the prologue comes first."""
    return sorted(range(len(node.accesses)), key=lambda k: not node.accesses[k].early)


def cuts(node: Kernel | Copy) -> range:
    """How many accesses may lie in front of the trigger; 0 alone without an explicit one."""
    if isinstance(node, Copy) or node.trigger == "never":
        return range(1)
    prologue = sum(access.early for access in node.accesses)
    everything = len(node.accesses)
    if not node.waits:
        return range(everything + 1)
    if node.trigger == "early":
        return range(prologue + 1)
    return range(prologue, everything + 1)


def latest_cut(program: Program) -> frozenset[Site]:
    """Every access that may lie in front of its kernel's trigger."""
    nodes = [launch.node for launch in program.launches]
    return _before(nodes, {node: cuts(node)[-1] for node in nodes})


def random_cut(program: Program, rng: random.Random) -> frozenset[Site]:
    """Accesses in front of their kernel's trigger, each cut equally likely.

    Equal kernels, which are one kernel issued again, are cut alike.
    """
    nodes = [launch.node for launch in program.launches]
    return _before(nodes, {node: rng.choice(cuts(node)) for node in dict.fromkeys(nodes)})


def _before(nodes: list[Kernel | Copy], cut: dict[Kernel | Copy, int]) -> frozenset[Site]:
    return frozenset(
        (number, place)
        for number, node in enumerate(nodes)
        for place in program_order(node)[: cut[node]]
    )


def reads(program: Program, sites: frozenset[Site]) -> frozenset[Site]:
    """Those that load: over at the trigger if the kernel has consumed what it loaded."""
    nodes = [launch.node for launch in program.launches]
    return frozenset((i, a) for i, a in sites if not nodes[i].accesses[a].write)


def fenced_writes(program: Program, sites: frozenset[Site]) -> frozenset[Site]:
    """Those that store in a kernel with a release fence in front of its trigger."""
    nodes = [launch.node for launch in program.launches]
    fenced = {i for i, node in enumerate(nodes) if isinstance(node, Kernel) and node.fenced}
    return frozenset((i, a) for i, a in sites if i in fenced and nodes[i].accesses[a].write)
