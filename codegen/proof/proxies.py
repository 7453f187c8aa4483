"""Stores of the generic proxy that TMA reads: ordered, and still not promised to be visible.

A bulk copy reads memory through the async proxy.  A dependency wait orders it behind the writer's
completion; that it also sees what plain stores have written is measured to fail where the reader
was already running when the writer ended.  So the reader has to start behind the writer's last
exit, or the writer has to fence between the two proxies in front of its trigger.
"""

from __future__ import annotations

from kpipe.codegen.diagnostics import Diagnostic
from kpipe.codegen.plan.model import StepPlan
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.program import Access, Program, Reuse
from kpipe.codegen.proof.races import Pair, Race, scan

PATHS = {
    "generic": "plain stores (generic proxy)",
    "async": "TMA (async proxy)",
}


def crossing_pairs(program: Program, order: Order | None = None) -> frozenset[Pair]:
    """Every (writer, its access, reader, its access), launches in host order, where plain stores
    without a proxy fence are read by TMA in a kernel that may start before the writer has exited.

    Pairs that are unordered altogether are among them.  `order` is the program's, where the caller
    has it.
    """
    stores: dict[str, list[tuple[int, int, Access]]] = {}
    found: list[Pair] = []
    for position, launch in enumerate(program.launches):
        node = launch.node
        for site in node.touched.bulk_reads:
            access = node.accesses[site]
            for first, first_site, written in stores.get(access.buffer, ()):
                if written.conflicts(access):
                    order = order or Order(program)
                    if not order.ordered((first, "X"), (position, "S")):
                        found.append((first, first_site, position, site))
        if isinstance(node, Reuse):
            continue
        for site in node.touched.stores:
            access = node.accesses[site]
            stores.setdefault(access.buffer, []).append((position, site, access))
    return frozenset(found)


def proxy_races(program: Program, strict: Order | None = None) -> tuple[Race, ...]:
    """The crossing pairs that are in order otherwise, as races of kind "PROXY"; sorted.

    `strict` is an order of the program that claims less, where the caller has one: what it orders
    need not be asked again.
    """
    if not crossing_pairs(program, strict):
        return ()
    order = Order(program)
    crossing = crossing_pairs(program, order)
    if not crossing:
        return ()
    launches = program.launches
    return tuple(
        sorted(
            Race(
                (first, first_site),
                (second, second_site),
                launches[second].node.accesses[second_site].buffer,
                "PROXY",
                "racy",
                "",
            )
            for first, first_site, second, second_site in crossing - frozenset(scan(order).pairs)
        )
    )


def proxy_reasons(first: str, second: str, buffer: str) -> tuple[str, str]:
    """Why the writer's release is held, and why the reader is launched plain."""
    return (
        f"held: {second} reads `{buffer}` by TMA, behind no proxy fence",
        f"plain: reads `{buffer}` by TMA, {first} stores it behind no proxy fence",
    )


def proxy_finding(step: StepPlan, program: Program, race: Race) -> Diagnostic | None:
    """The finding of a proxy race, with both access paths and both places; None for another."""
    if race.kind != "PROXY":
        return None
    sites = race.first, race.second
    first, second = (program.launches[position].node for position, _ in sites)
    paths = [PATHS[program.launches[p].node.accesses[s].path] for p, s in sites]
    buffer = race.declared
    spans = {launch.name: launch.span for launch in step.launches}
    related = [("writer", spans[first.name])] if first.name in spans else []
    return Diagnostic(
        "KP307",
        f"mode `{step.mode}`: `{second.name}` reads `{buffer}` by {paths[1]}, `{first.name}` "
        f"writes it by {paths[0]} and lets it start before the last store",
        spans.get(second.name) or spans.get(first.name),
        help=f"fence between the proxies in front of the trigger of `{first.name}` and say so in "
        f"its contract (`proxy_fence`), or hold its release: "
        f"`pdl: {{{first.name}: hold}}`",
        related=tuple(related),
    )
