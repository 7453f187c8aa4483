"""Contracts of the sparse attention cores: ours and the libraries'."""

from __future__ import annotations

from .contract import (
    Access,
    Contract,
    Derive,
    Flag,
    Kind,
    Limits,
    Operand,
    Phase,
    Release,
    Scratch,
    cache,
    mailbox,
    reads,
    weight,
    writes,
)


def _core_operands(
    *, early: tuple[str, ...] = (), pushes: bool = False, heads: str = "heads"
) -> tuple[Operand, ...]:
    """Every sparse core binds the same operands; libraries touch some of them early."""
    phase = Phase.PROLOGUE if "query" in early else Phase.BODY
    gathered = Operand(
        "q_mail",
        Kind.BUFFER,
        Access.READ,
        ("rows_cap", "tp * heads", "latent"),
        "query",
        phase,
        "dcp",
    )
    outputs = (
        mailbox("partial_mail", Access.PUBLISH, "dcp, rows_cap, heads, kv_lora", "bf16"),
        mailbox("lse_mail", Access.PUBLISH, "dcp, rows_cap, heads", "fp32"),
    )
    local = (
        writes("partial", "rows, tp * heads, kv_lora", "bf16", when="dcp"),
        writes("partial_lse", "rows, tp * heads", "fp32", when="dcp"),
    )
    return (
        cache("latent_kv", Access.READ),
        reads("selected", "rows, top_k", "i32", early="selected" in early),
        reads("valid", "rows", "i32", early="valid" in early),
        weight("q_scale", "1", "fp32"),
        weight("k_scale", "1", "fp32"),
        reads("query", f"rows, {heads}, latent", "query", early="query" in early, when="!dcp"),
        gathered,
        writes("latent", f"rows, {heads}, kv_lora", "bf16", when="!dcp"),
        *(outputs if pushes else local),
    )


_DCP = (Flag("dcp", Derive.CONTEXT_PARALLEL, doc="runs every rank's heads over the local shard"),)
_CONSTANTS = ("softmax_scale", "kv_lora", "lse_base")

SPARSE_DECODE = Contract(
    name="sparse_decode",
    doc="FP8 rows gathered by physical index, split over the selected keys, merged; head tiles of "
    "16, so that 12 heads pay for 16 and not for 64.",
    operands=_core_operands(),
    flags=_DCP,
    constants=_CONSTANTS,
    reference="sparse_core:sparse_decode",
    limits=Limits(cache_formats=("fp8_tensor", "fp8_ds_mla"), heads=((1, 128),)),
    scratch=(Scratch("split_partials", "rows * splits * core_heads * (kv_lora + 1) * 4"),),
    lse_base="2",
    empty_row="zero, -inf",
    tile=("splits",),
)

SPARSE_PUSH = Contract(
    name="sparse_push",
    doc="As sparse_decode under context parallelism; pushes each head's row and LSE straight into "
    "its owner's mailbox, so that dcp_value only merges.",
    operands=_core_operands(pushes=True),
    flags=_DCP,
    constants=(*_CONSTANTS, "shard"),
    reference="sparse_core:sparse_push",
    limits=Limits(cache_formats=("fp8_tensor", "fp8_ds_mla"), heads=((1, 128),), tp=False),
    scratch=SPARSE_DECODE.scratch,
    lse_base="2",
    empty_row="zero, -inf",
    tile=("splits",),
)

TRTLLM_GEN = Contract(
    name="trtllm_gen",
    doc="FlashInfer trtllm-gen sparse decode. Fetches the per-row counts ahead of its wait.",
    source="flashinfer",
    operands=_core_operands(early=("valid",)),
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
    operands=_core_operands(early=("query", "selected")),
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
    operands=_core_operands(),
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
    lse_base="e",
    empty_row="undefined",
)

TOKENSPEED_SPARSE = Contract(
    name="tokenspeed_sparse",
    doc="tokenspeed sparse decode (Blackwell); call shape as prims_ts, waits before any read.",
    source="tokenspeed",
    operands=_core_operands(),
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
    SPARSE_PUSH,
    TRTLLM_GEN,
    PRIMS_TS,
    FLASHMLA_SPARSE,
    TOKENSPEED_SPARSE,
)
