"""What to do about an edge whose two ends mean different things.

The texts name ops of ours; a test holds them against the contracts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType

from kpipe.codegen.ops.types import IndexSpace, LseBase, Placement
from kpipe.codegen.plan.flags import Seat

_TO_ROWS = (
    "put `topk_select` (under context parallelism `topk_local` and `topk_merge`) between the two: "
    "it maps positions to physical cache rows"
)

# (written, wanted) -> repair
CONVERSIONS: Mapping[tuple[Enum, Enum], str] = MappingProxyType(
    {
        (IndexSpace.GLOBAL, IndexSpace.PHYSICAL): _TO_ROWS,
        (IndexSpace.LOCAL, IndexSpace.PHYSICAL): _TO_ROWS,
        (IndexSpace.LOCAL, IndexSpace.GLOBAL): "put `topk_local` between the two: it turns "
        "positions of this rank's share into token positions",
        (IndexSpace.GLOBAL, IndexSpace.LOCAL): "put an op between the two that keeps the tokens "
        "of this rank and renumbers them, as `topk_merge` does",
        (Placement.PARTIAL, Placement.REPLICATED): "put `o_reduce` between the two: it adds up the "
        "parts of all ranks; without context parallelism the engine does so behind the layer",
        (Placement.GATHERED, Placement.HEAD_SHARDED): "put `dcp_value` between the two: it sends "
        "every head to its owner and merges the shares",
        (Placement.CONTEXT_SHARDED, Placement.REPLICATED): "put ops between the two that exchange "
        "the shares, as `topk_local` and `topk_merge` do for scores",
        (Placement.HEAD_SHARDED, Placement.REPLICATED): "gather the heads first: publish them to "
        "a mailbox of every rank, as `mla_query` does under context parallelism",
    }
)

OTHERWISE: Mapping[str, str] = MappingProxyType(
    {
        "space": "nothing converts these; bind `{reader}` to a tensor of {want}",
        "placement": "nothing converts these; bind `{reader}` to a tensor that holds {want}",
        "empty": "choose a core that clears rows without keys (`sparse_decode`, "
        "`sparse_decode_wide`, `sparse_push`, `trtllm_gen`, `prims_ts`), or a core that leaves the "
        "push to `dcp_value`, which clears them by `valid`",
        "mask": "bind `{reader}` to a tensor that tells apart {want}",
        "format": "let `topk_select` (under context parallelism `topk_merge`) write the list, or "
        "choose a core that skips -1 anywhere (`flashmla_sparse`)",
    }
)


def repair(field: str, have: Enum, want: Enum, reader: str, seats: Sequence[Seat]) -> str:
    """One sentence: the op to put between, or the core to choose."""
    if field == "lse":
        return _one_base(want, reader, seats)
    text = CONVERSIONS.get((have, want)) or OTHERWISE[field]
    return text.format(reader=reader, want=want.value)


def _one_base(want: Enum, reader: str, seats: Sequence[Seat]) -> str:
    """Merges are told one base for the whole plan; other readers know only their own."""
    bases = {s.contract.name: s.contract.lse_base for s in seats if s.contract.lse_base}
    words = " and ".join(f"`{name}` writes base {base}" for name, base in sorted(bases.items()))
    base = "e" if want is LseBase.E else "2"
    if len(set(bases.values())) > 1:
        return f"choose cores of one base, since a merge is told a single one: {words}"
    return (
        f"`{reader}` knows base {base} only and {words}: choose a core of base {base}, or a merge "
        "that is told the base (`dcp_value`)"
    )
