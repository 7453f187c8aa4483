"""Tiles of a kernel that are worth timing at a row count, the nearest to the present one first."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import log2

from kpipe.codegen.ops.contract import Contract, Tactic
from kpipe.codegen.tune.model import OWN_TILE, Candidate, LeftOut

ROWS_FIELD = "tokens"  # rows of the step that a CTA or a cluster takes


def tile_name(tactic: Tactic) -> str:
    """`tile_n 32, tokens 8`."""
    return ", ".join(f"{name} {value}" for name, value in tactic) or OWN_TILE


def tile_candidates(
    contract: Contract, present: Tactic, rows: int, most: int
) -> tuple[tuple[Candidate, ...], tuple[LeftOut, ...]]:
    """The present tile and the nearest of those that the contract names, `most` in all.

    Left out without being named are tiles with room for more rows than the smallest that holds
    all of the step's: they do the same work in larger pieces.
    """
    usual = {name: values[0] for name, values in contract.tile_values}
    now = {**usual, **dict(present)}
    found = [tactic for tactic in _tiles(contract, rows) if dict(tactic) != now]
    found.sort(key=lambda tactic: _distance(tactic, now))
    found = [_said(tactic, usual, dict(present)) for tactic in found]
    kept, rest = found[: most - 1], found[most - 1 :]
    candidates = tuple(Candidate(tile_name(one), tactic=one) for one in (present, *kept))
    reason = "further from the present tile than those that are measured"
    return candidates, tuple(LeftOut(tile_name(one), reason) for one in rest)


def _said(tactic: Tactic, usual: Mapping[str, int], present: Mapping[str, int]) -> Tactic:
    """The tile without fields that the present one leaves to the kernel and that stay as it has
    them."""
    return tuple((n, value) for n, value in tactic if n in present or value != usual[n])


def _tiles(contract: Contract, rows: int) -> list[Tactic]:
    values = dict(contract.tile_values)
    if ROWS_FIELD in values:
        holding = [value for value in sorted(values[ROWS_FIELD]) if value >= rows]
        most = holding[0] if holding else max(values[ROWS_FIELD])
        values[ROWS_FIELD] = tuple(v for v in values[ROWS_FIELD] if v <= most)
    names = [name for name in contract.tile if name in values]
    return [
        tuple(zip(names, chosen, strict=True))
        for chosen in product(*(values[name] for name in names))
    ]


def _distance(tactic: Tactic, now: Mapping[str, int]) -> tuple[int, float]:
    """How many fields differ, then the doublings and halvings between them; a switch has none."""
    changed = sum(value != now[name] for name, value in tactic)
    return changed, sum(abs(log2(max(value, 1) / max(now[name], 1))) for name, value in tactic)
