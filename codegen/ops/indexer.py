"""Contracts of the indexer: index query and key, scores, exact top-k, candidate exchange."""

from __future__ import annotations

from .contract import (
    Access,
    Contract,
    Derive,
    Flag,
    Limits,
    Option,
    Path,
    Release,
    cache,
    mailbox,
    reads,
    step,
    tactics,
    weight,
    writes,
)
from .types import BY_POSITION, COUNTS, GLOBAL_IDS, LENGTHS, REPLICATED, ROW_LIST, SLOTS

_TIE = Option(
    "tie", ("low_id", "high_id"), doc="which of several equal scores at the k-th place is kept"
)

_PARTS = tactics(  # all resident
    (15, {"parts": 8, "threads": 1024}),
    (32, {"parts": 4, "threads": 1024}),
    (64, {"parts": 2, "threads": 1024}),
)

_PARTS_VALUES = (("parts", (8, 2, 4, 16)), ("threads", (1024, 512, 384, 256)))

_KEY_OPERANDS = (
    reads("wk", "rows, index_dim", "bf16", type=REPLICATED),
    reads("wv", "rows, index_heads", "bf16", type=REPLICATED),
    step("index_slots", "rows", "i64", type=SLOTS, gates=("index_kv",)),
    weight("index_k_norm", "index_dim", "fp32"),
    weight("index_k_bias", "index_dim", "fp32"),
    cache("index_kv", Access.INSERT),
    writes("index_q8", "rows, index_heads, index_dim", "fp8", type=REPLICATED),
    writes("index_w", "rows, index_heads", "fp32", type=REPLICATED),
)

DSA_INDEX = Contract(
    name="dsa_index",
    doc="Indexer operands: LayerNorm of the key, UE8M0 quantisation of key and query, paged key "
    "insert, head weights with every scale folded in.",
    operands=(
        reads("index_q", "rows, index_heads * index_dim", "bf16", type=REPLICATED),
        *_KEY_OPERANDS,
    ),
    constants=("index_eps", "index_heads", "index_dim", "index_quant"),
    reference="indexer:dsa_index",
    kernel="dsa_index",
    proxy_fence=("index_kv",),
    fixes=(("index_quant", "ue8m0"),),
    limits=Limits(cache_formats=("index_fp8",), divides=(("index_dim", 32),)),
)

INDEX_FRONT = Contract(
    name="index_front",
    doc="q_a norm, index query GEMM and dsa_index in one kernel; the index query stays FP32 until "
    "it is quantised. Reads q_c where another op of the mode has written it.",
    operands=(
        reads("q_a", "rows, q_lora", "bf16", when="!normalized", type=REPLICATED),
        reads("q_c", "rows, q_lora", "bf16", when="normalized", type=REPLICATED),
        weight("q_norm", "q_lora"),
        weight("index_q_b", "index_heads * index_dim, q_lora"),
        *_KEY_OPERANDS,
    ),
    flags=(Flag("normalized", Derive.IS_WRITTEN, "q_c"),),
    constants=("rms_eps", "index_eps", "index_heads", "index_dim", "index_quant"),
    reference="indexer:index_front",
    kernel="index_front",
    proxy_fence=("index_kv",),
    fixes=(("index_quant", "ue8m0"),),
    limits=Limits(
        cache_formats=("index_fp8",),
        divides=(("q_lora", 32), ("index_dim", 32)),
    ),
    tile=("tile_n", "tokens", "held"),
    tile_parts=(("tile_n", "index_dim"),),
    tile_values=(("tile_n", (32, 16, 64)), ("tokens", (16, 8, 32, 64)), ("held", (32, 16, 8))),
    tactics=tactics(
        (8, {"tile_n": 64, "tokens": 8, "held": 8}), (16, {"tokens": 16}), (64, {"tokens": 64})
    ),
)

INDEX_SCORES = Contract(
    name="index_scores",
    doc="score_j = k_scale_j * sum_h w_h * relu(q_h . k_j) over the visible keys (this rank's, "
    "where contexts are sharded), FP32; columns past the visible length are left alone.",
    operands=(
        reads("index_q8", "rows, index_heads, index_dim", "fp8", type=REPLICATED),
        reads("index_w", "rows, index_heads", "fp32", type=REPLICATED),
        cache("index_kv", Access.READ, path=Path.ASYNC),
        step("index_table", "requests, index_pages", "i32", early=True, type=BY_POSITION),
        step("lengths", "requests", "i32", early=True, type=LENGTHS),
        writes("scores", "rows, context", "fp32", type=BY_POSITION),
    ),
    constants=("shard",),
    reference="indexer:index_scores",
    kernel="index_scores",
    limits=Limits(
        cache_formats=("index_fp8",),
        pages=(64,),
        queries=(1, 2, 4),
        divides=(("index_dim", 32),),
    ),
    tile=("ctas", "ahead", "lead", "groups", "stages"),
    tile_values=(
        ("ctas", (132, 100, 84, 64)),
        ("ahead", (0, 84)),
        ("lead", (0, 16, 32)),
        ("groups", (3, 2)),
        ("stages", (9, 6, 12, 18)),
    ),
)

TOPK_SELECT = Contract(
    name="topk_select",
    doc="Exact top-k of the visible scores, mapped to physical cache rows, -1 behind the last.",
    operands=(
        reads("scores", "rows, context", "fp32", type=BY_POSITION),
        step("lengths", "requests", "i32", early=True, type=LENGTHS),
        step("block_table", "requests, pages", "i32", early=True, type=BY_POSITION),
        cache("latent_kv", Access.LAYOUT),
        writes("selected", "rows, top_k", "i32", type=ROW_LIST),
        writes("valid", "rows", "i32", type=COUNTS),
    ),
    options=(_TIE,),
    constants=("top_k",),
    reference="select:topk_select",
    kernel="topk_select",
    release=Release.AFTER_LOADS,
    limits=Limits(dcp=False, divides=(("context", 128),)),
    tile=("parts", "threads"),
    tactics=_PARTS,
    tile_values=_PARTS_VALUES,
)

_CANDIDATES = "dcp, rows_cap, top_k, 2"

TOPK_LOCAL = Contract(
    name="topk_local",
    doc="This rank's best min(top_k, local visible) keys, published to every rank as pairs of "
    "(score bits, global id); the tail holds (-inf, no id).",
    operands=(
        reads("scores", "rows, context", "fp32", type=BY_POSITION),
        step("lengths", "requests", "i32", early=True, type=LENGTHS),
        mailbox("candidates", Access.PUBLISH, _CANDIDATES, "i32", type=GLOBAL_IDS),
    ),
    options=(_TIE,),
    constants=("top_k", "shard"),
    reference="select:topk_local",
    kernel="topk_local",
    limits=Limits(tp=False, divides=(("context", 128),)),
    tile=("parts", "threads"),
    tactics=_PARTS,
    tile_values=_PARTS_VALUES,
)

TOPK_MERGE = Contract(
    name="topk_merge",
    doc="Exact global top-k of all ranks' candidates, kept to the keys that this rank owns, as "
    "physical rows, compacted valid-first. Re-arms the candidates.",
    operands=(
        mailbox("candidates", Access.CONSUME, _CANDIDATES, "i32", type=GLOBAL_IDS),
        step("lengths", "requests", "i32", type=LENGTHS),
        step("block_table", "requests, pages", "i32", type=BY_POSITION),
        cache("latent_kv", Access.LAYOUT),
        writes("selected", "rows, top_k", "i32", type=ROW_LIST),
        writes("valid", "rows", "i32", type=COUNTS),
    ),
    options=(_TIE,),
    constants=("top_k", "shard"),
    reference="select:topk_merge",
    kernel="topk_merge",
    release=Release.NEVER,
    limits=Limits(tp=False, divides=(("top_k", 2),)),
)

CONTRACTS = (DSA_INDEX, INDEX_FRONT, INDEX_SCORES, TOPK_SELECT, TOPK_LOCAL, TOPK_MERGE)
