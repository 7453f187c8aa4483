"""Contracts of the sparse attention cores: ours and the libraries'."""

from __future__ import annotations

from dataclasses import replace

from .contract import (
    Access,
    Contract,
    Derive,
    Flag,
    Kind,
    Limits,
    Operand,
    Path,
    Phase,
    Release,
    Scratch,
    cache,
    mailbox,
    reads,
    tactics,
    weight,
    writes,
)
from .types import (
    COUNTS,
    HEADS,
    REPLICATED,
    ROW_LIST,
    ROW_LIST_WITH_HOLES,
    EmptyRow,
    LseBase,
    Placement,
    TypePair,
    ValueType,
)

_BASES = {"2": LseBase.TWO, "e": LseBase.E}
_EMPTY_ROWS = {"zero, -inf": EmptyRow.ZERO_NEG_INF, "undefined": EmptyRow.UNDEFINED}


def _core_operands(
    lse_base: str,
    empty_row: str,
    *,
    early: tuple[str, ...] = (),
    pushes: bool = False,
    heads: str = "heads",
    rows: TypePair = ROW_LIST,
    path: Path = Path.GENERIC,
) -> tuple[Operand, ...]:
    """Every sparse core binds the same operands; libraries touch some of them early.

    `lse_base` and `empty_row` are the contract's; `rows` is the list of keys that it can read, and
    `path` the way that it reads them.
    """
    empty = _EMPTY_ROWS[empty_row]
    latent = ValueType(placement=Placement.HEAD_SHARDED, empty=empty)
    sent = ValueType(placement=Placement.PARTIAL, empty=empty)
    partial = ValueType(placement=Placement.GATHERED, empty=empty)
    base = _BASES[lse_base]
    phase = Phase.PROLOGUE if "query" in early else Phase.BODY
    gathered = Operand(
        "q_mail",
        Kind.BUFFER,
        Access.READ,
        ("rows_cap", "tp * heads", "latent"),
        "query",
        phase,
        "dcp",
        REPLICATED,
    )
    outputs = (
        mailbox("partial_mail", Access.PUBLISH, "dcp, rows_cap, heads, kv_lora", "bf16", type=sent),
        mailbox(
            "lse_mail",
            Access.PUBLISH,
            "dcp, rows_cap, heads",
            "fp32",
            type=replace(sent, lse=base),
        ),
    )
    local = (
        writes("partial", "rows, tp * heads, kv_lora", "bf16", when="dcp", type=partial),
        writes(
            "partial_lse",
            "rows, tp * heads",
            "fp32",
            when="dcp",
            type=replace(partial, lse=base),
        ),
    )
    return (
        cache("latent_kv", Access.READ, path=path),
        reads("selected", "rows, top_k", "i32", early="selected" in early, type=rows),
        reads(
            "valid",
            "rows",
            "i32",
            early="valid" in early,
            type=COUNTS,
            gates=("latent", *(o.name for o in (outputs if pushes else local))),
        ),
        weight("q_scale", "1", "fp32"),
        weight("k_scale", "1", "fp32"),
        reads(
            "query",
            f"rows, {heads}, latent",
            "query",
            early="query" in early,
            when="!dcp",
            type=HEADS,
        ),
        gathered,
        writes("latent", f"rows, {heads}, kv_lora", "bf16", when="!dcp", type=latent),
        *(outputs if pushes else local),
    )


_SPLITS = (("splits", (1, 2, 3, 4, 6, 8, 12, 16)),)
_DCP = (Flag("dcp", Derive.CONTEXT_PARALLEL, doc="runs every rank's heads over the local shard"),)
_CONSTANTS = ("softmax_scale", "kv_lora", "lse_base")

SPARSE_DECODE = Contract(
    name="sparse_decode",
    doc="FP8 rows gathered by physical index, split over the selected keys among the CTAs of a "
    "cluster and merged in their shared memory; head tiles of 16, so that 12 heads pay for 16 and "
    "not for 64.",
    operands=_core_operands("2", "zero, -inf", path=Path.ASYNC),
    kernel="sparse_decode",
    flags=_DCP,
    constants=_CONSTANTS,
    reference="sparse_core:sparse_decode",
    limits=Limits(
        cache_formats=("fp8_tensor", "fp8_ds_mla"),
        heads=((1, 128),),
        divides=(("kv_lora", 128), ("latent", 16)),
    ),
    lse_base="2",
    empty_row="zero, -inf",
    tile=("splits",),
    tactics=tactics(
        (4, {"splits": 16}),
        (8, {"splits": 8}),
        (16, {"splits": 6}),
        (32, {"splits": 3}),
        (64, {"splits": 2}),
    ),
    tile_values=_SPLITS,
)

SPARSE_DECODE_WIDE = Contract(
    name="sparse_decode_wide",
    doc="As sparse_decode for 64 heads and more: tiles of 64 heads, whose products are those of "
    "whole warpgroups (wgmma), so that a row is gathered and converted once for 64 heads.",
    operands=_core_operands("2", "zero, -inf"),
    kernel="sparse_decode_wide",
    flags=_DCP,
    constants=_CONSTANTS,
    reference="sparse_core:sparse_decode",
    limits=Limits(
        archs=("sm_90a",),
        cache_formats=("fp8_tensor", "fp8_ds_mla"),
        heads=((64, 128),),
        divides=(("kv_lora", 512), ("latent - kv_lora", 64)),
    ),
    lse_base="2",
    empty_row="zero, -inf",
    tile=("splits", "parts"),
    tactics=tactics(
        (1, {"splits": 16, "parts": 2}),
        (3, {"splits": 8, "parts": 2}),
        (7, {"splits": 8}),
        (10, {"splits": 6}),
        (16, {"splits": 3}),
        (32, {"splits": 2}),
        (64, {"splits": 1}),
    ),
    tile_values=(*_SPLITS, ("parts", (1, 2, 4))),
)

SPARSE_PUSH = Contract(
    name="sparse_push",
    doc="As sparse_decode under context parallelism; pushes each head's row and LSE straight into "
    "its owner's mailbox, so that dcp_value only merges.",
    operands=_core_operands("2", "zero, -inf", pushes=True),
    flags=_DCP,
    constants=(*_CONSTANTS, "shard"),
    reference="sparse_core:sparse_push",
    limits=Limits(cache_formats=("fp8_tensor", "fp8_ds_mla"), heads=((1, 128),), tp=False),
    lse_base="2",
    empty_row="zero, -inf",
    tile=("splits",),
)

TRTLLM_GEN = Contract(
    name="trtllm_gen",
    doc="FlashInfer trtllm-gen sparse decode. Fetches the per-row counts ahead of its wait.",
    source="flashinfer",
    operands=_core_operands("2", "zero, -inf", early=("valid",)),
    flags=_DCP,
    constants=_CONSTANTS,
    reference="sparse_core:sparse_decode",
    release=Release.LIBRARY,
    limits=Limits(
        archs=("sm_100a",),
        cache_formats=("fp8_tensor",),
        heads=((1, 64), (128, 128)),
        head_pad=(128,),
    ),
    scratch=(
        Scratch("workspace", "128 * 1024 * 1024"),
        Scratch("counters", "64 * core_heads * 4", zero_once=True),
    ),
    lse_base="2",
    empty_row="zero, -inf",
)

PRIMS_TS = Contract(
    name="prims_ts",
    doc="FlashInfer prims_ts split-KV sparse decode. Reads its query and its row list ahead of "
    "its wait.",
    source="flashinfer",
    operands=_core_operands("e", "zero, -inf", early=("query", "selected")),
    flags=_DCP,
    constants=_CONSTANTS,
    reference="sparse_core:sparse_decode",
    release=Release.LIBRARY,
    limits=Limits(
        archs=("sm_100a",),
        cache_formats=("fp8_tensor", "nvfp4_ds_mla"),
        heads=((1, 64), (128, 128)),
        head_pad=(128,),
    ),
    scratch=(Scratch("split_partials", "rows * splits * core_heads * (kv_lora + 1) * 4"),),
    lse_base="e",
    empty_row="zero, -inf",
    tile=("splits",),
)

FLASHMLA_SPARSE = Contract(
    name="flashmla_sparse",
    doc="FlashMLA sparse decode over fp8_ds_mla rows, BF16 query padded to 64 or 128 heads.",
    source="flash_mla",
    operands=_core_operands("e", "undefined", rows=ROW_LIST_WITH_HOLES),
    flags=_DCP,
    constants=_CONSTANTS,
    reference="sparse_core:sparse_decode",
    release=Release.LIBRARY,
    waits=False,
    limits=Limits(
        archs=("sm_90a", "sm_100a"),
        cache_formats=("fp8_ds_mla",),
        heads=((64, 64), (128, 128)),
        head_pad=(64, 128),
        pages=(64,),
    ),
    # The heads behind the layer's own are zero: nothing but the clearing ever writes them.
    scratch=(Scratch("padded_query", "rows * core_heads * latent * 2", zero_once=True),),
    lse_base="e",
    empty_row="undefined",
)

TOKENSPEED_SPARSE = Contract(
    name="tokenspeed_sparse",
    doc="tokenspeed sparse decode (Blackwell); call shape as prims_ts, waits before any read.",
    source="tokenspeed",
    operands=_core_operands("2", "undefined"),
    flags=_DCP,
    constants=_CONSTANTS,
    reference="sparse_core:sparse_decode",
    release=Release.LIBRARY,
    limits=Limits(archs=("sm_100a",), cache_formats=("fp8_tensor",), heads=((1, 128),)),
    lse_base="2",
    empty_row="undefined",
)

CONTRACTS = (
    SPARSE_DECODE,
    SPARSE_DECODE_WIDE,
    SPARSE_PUSH,
    TRTLLM_GEN,
    PRIMS_TS,
    FLASHMLA_SPARSE,
    TOKENSPEED_SPARSE,
)
