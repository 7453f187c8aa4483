"""Tile parameters of kernels: what the spec says for some rows, else what was measured best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kpipe.codegen.ops.contract import Contract, Tactic
from kpipe.codegen.plan.stages import Slot
from kpipe.codegen.spec.document import Mapping as MappingNode


def tactic_at(
    slot: Slot, contract: Contract, dims: Mapping[str, int], arch: str, q: int, rows: int
) -> Tactic:
    """The fields of one launch, in the order of the contract; empty for the kernel's own."""
    table = slot.tactics.get(contract.name)
    cell = table.at(arch, q, rows) if table else None
    if cell is None or not isinstance(cell.value, MappingNode):
        return contract.tactic(rows, dims)
    said = {entry.key: entry.value.value for entry in cell.value.entries}  # type: ignore[union-attr]
    return tuple((name, said[name]) for name in contract.tile if name in said)


def tactics_of(
    contract: Contract,
    slots: Iterable[Slot],
    targets: Iterable[str],
    rows: Mapping[int, tuple[int, ...]],
    dims: Mapping[str, int],
) -> tuple[tuple[str, int, Tactic], ...]:
    """(arch, most rows, fields) of an op for every declared row count, whatever the modes select.

    `rows` are the counts by query length; counts that are tiled alike are one entry.  Without
    fields, for the kernel's own, are only entries with another one behind them.
    """
    slot = next((slot for slot in slots if contract.name in slot.choices), None)
    if slot is None:
        return ()
    found: list[tuple[str, int, Tactic]] = []
    counts = sorted({(count, q) for q, known in rows.items() for count in known})
    for arch in targets:
        for count, q in counts:
            tactic = tactic_at(slot, contract, dims, arch, q, count)
            if found and found[-1][0] == arch and found[-1][2] == tactic:
                found.pop()
            found.append((arch, count, tactic))
        if not found[-1][2]:
            found.pop()
    return tuple(found)
