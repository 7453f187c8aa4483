"""Contracts of the projections: packed input rows, index query, o-projection."""

from __future__ import annotations

from .contract import (
    Access,
    Contract,
    Derive,
    Flag,
    Limits,
    Option,
    Release,
    mailbox,
    reads,
    step,
    tactics,
    weight,
    writes,
)
from .types import HEADS, PARTIAL, REPLICATED, ColumnTypes

_PROJECTED = ColumnTypes(
    (
        ("q_a", REPLICATED),
        ("kv_a", REPLICATED),
        ("gate", HEADS),
        ("wk", REPLICATED),
        ("wv", REPLICATED),
    )
)

# Outputs and rows of a CTA, KiB of its ring, and of its weights that are on their way at a time.
_TILE = ("tile_n", "tokens", "ring", "window")
_WINDOW = ("window", (0, 32, 48, 64, 96))
_TOKENS = ("tokens", (8, 16, 32, 64))
_SMALLEST_TILE = tactics(
    (8, {"tile_n": 32, "tokens": 8}),
    (16, {"tile_n": 32, "tokens": 16}),
    (32, {"tile_n": 32, "tokens": 32}),
    (64, {"tile_n": 32, "tokens": 64}),
)
# Measured with an index_front that fitted beside half a ring.  That of today takes an SM for itself
# (decision 17), and whole rings were measured for it: the table of dsa_tp says so.
_BESIDE_INDEX_FRONT = (
    *tactics((8, {"tile_n": 32, "tokens": 8, "ring": 104})),
    *_SMALLEST_TILE[1:],
)

# Half a ring: what runs beside it on an SM keeps room.
_BESIDE_THE_CORE = tuple((rows, (*tile, ("ring", 112))) for rows, tile in _SMALLEST_TILE)

PACKED_GEMM = Contract(
    name="packed_gemm",
    doc="One GEMM for all input projections: y = x @ W^T, FP32 accumulation, one cast to BF16. "
    "The gate's columns are left to gate_gemm where a mode has it.",
    operands=(
        step("hidden", "rows, hidden", "bf16", type=REPLICATED),
        weight("packed", "pitch, hidden"),
        writes("projected", "rows, pitch", "bf16", type=_PROJECTED),
    ),
    flags=(Flag("without_gate", Derive.WRITTEN_APART, "gate"),),
    constants=("gate_columns",),
    reference="projection:packed_gemm",
    kernel="packed_gemm",
    parts=(
        ("packed", "without_gate", "pitch - heads * v_dim, hidden"),
        ("projected", "without_gate", "rows, pitch - heads * v_dim"),
    ),
    release=Release.AFTER_WEIGHTS,
    limits=Limits(divides=(("hidden", 64),)),
    tile=_TILE,
    tactics=_BESIDE_INDEX_FRONT,
    tile_values=(("tile_n", (32, 24, 48, 16, 64)), _TOKENS, ("ring", (227, 104, 112, 72)), _WINDOW),
)

GATE_GEMM = Contract(
    name="gate_gemm",
    doc="The output gate's columns of the packed projection, which nothing but the value needs: "
    "y = x @ W^T, FP32 accumulation, one cast to BF16. Its weights may stream in while the middle "
    "of the layer leaves memory idle.",
    operands=(
        step("hidden", "rows, hidden", "bf16", type=REPLICATED),
        weight("packed", "pitch, hidden"),
        writes("gate", "rows, heads * v_dim", "bf16", type=HEADS),
    ),
    constants=("gate_columns",),
    reference="projection:gate_gemm",
    kernel="gate_gemm",
    parts=(("packed", "", "heads * v_dim, hidden"),),
    release=Release.AFTER_WEIGHTS,
    limits=Limits(divides=(("hidden", 64),)),
    tile=_TILE,
    tactics=_BESIDE_THE_CORE,
    tile_values=(
        ("tile_n", (32, 24, 16, 64, 48, 96, 128)),
        _TOKENS,
        ("ring", (112, 56, 72, 227)),
        _WINDOW,
    ),
)

INDEX_GEMM = Contract(
    name="index_gemm",
    doc="Indexer query: iq = q_c @ Wq_index^T, FP32 accumulation, rounded to BF16.",
    operands=(
        reads("q_c", "rows, q_lora", "bf16", type=REPLICATED),
        weight("index_q_b", "index_heads * index_dim, q_lora"),
        writes("index_q", "rows, index_heads * index_dim", "bf16", type=REPLICATED),
    ),
    reference="projection:index_gemm",
    kernel="index_gemm",
    release=Release.AFTER_LOADS,
    limits=Limits(divides=(("q_lora", 64),)),
    tile=_TILE,
    tactics=_SMALLEST_TILE,
    tile_values=(("tile_n", (32, 16, 64, 128)), _TOKENS, _WINDOW),
)

O_PROJ = Contract(
    name="o_proj",
    doc="Output projection of this rank's heads: partial[rows, hidden], BF16. Under context "
    "parallelism the partial goes straight into the peers' mailboxes.",
    operands=(
        reads("gated", "rows, heads * v_dim", "bf16", type=HEADS),
        weight("o_proj", "hidden, heads * v_dim"),
        step("out", "rows, hidden", "bf16", write=True, when="!dcp", type=PARTIAL),
        mailbox(
            "o_mail",
            Access.PUBLISH,
            "tp, rows_cap, hidden",
            "bf16",
            when="dcp",
            type=PARTIAL,
            scattered="two_shot",
        ),
    ),
    flags=(
        Flag("dcp", Derive.CONTEXT_PARALLEL),
        Flag("two_shot", Derive.OPTION, "reduce"),
    ),
    options=(
        Option(
            "reduce",
            ("one_shot", "two_shot"),
            table=True,
            doc="one_shot: every rank gets every partial; two_shot: each column goes to its owner.",
        ),
    ),
    reference="projection:o_proj",
    kernel="o_proj",
    release=Release.AFTER_LOADS,
    limits=Limits(divides=(("heads * v_dim", 64),)),
    tile=_TILE,
    tactics=tactics(
        (8, {"tile_n": 64, "tokens": 8}),  # all weights ahead of the wait
        (16, {"tile_n": 64, "tokens": 16}),
        (32, {"tile_n": 64, "tokens": 32}),
        (64, {"tile_n": 64, "tokens": 64}),
    ),
    tile_values=(
        ("tile_n", (64, 56, 96, 112, 128, 32, 16)),
        _TOKENS,
        ("ring", (227, 112)),
        _WINDOW,
    ),
)

O_REDUCE = Contract(
    name="o_reduce",
    doc="Sums the ranks' partials in rank order in FP32, rounds once to BF16. Two-shot: sums the "
    "columns it owns, publishes them to every rank, then polls the gathered row. Behind the "
    "rounding it may add the residual stream, and mix that with the saved blocks (AttnRes).",
    operands=(
        mailbox("o_mail", Access.CONSUME, "tp, rows_cap, hidden", "bf16", type=PARTIAL),
        step("out", "rows, hidden", "bf16", write=True, type=REPLICATED),
        mailbox(
            "o_gather",
            Access.EXCHANGE,
            "rows_cap, hidden",
            "bf16",
            when="two_shot",
            type=REPLICATED,
        ),
        step("prefix", "rows, hidden", "bf16", when="add_prefix", type=REPLICATED),
        step("saved", "blocks, rows, hidden", "bf16", when="mix_blocks", type=REPLICATED),
        weight("mix_norm", "hidden", when="mix_blocks"),
        weight("mix_query", "hidden", when="mix_blocks"),
        weight("out_norm", "hidden", when="mix_blocks"),
        step("new_prefix", "rows, hidden", "bf16", write=True, when="mix_blocks", type=REPLICATED),
    ),
    flags=(
        Flag("two_shot", Derive.OPTION, "reduce"),
        Flag("add_prefix", Derive.OPTION, "residual"),
        Flag("mix_blocks", Derive.OPTION, "attn_res"),
    ),
    options=(
        Option("reduce", ("one_shot", "two_shot"), table=True),
        Option(
            "residual",
            ("none", "add_prefix"),
            doc="add_prefix: the sum, rounded to BF16, is added to the residual stream `prefix` of "
            "the step; `out` is the new residual stream.",
        ),
        Option(
            "attn_res",
            ("none", "mix_blocks"),
            doc="mix_blocks: `out` is the normed mixture of the saved blocks and the new residual "
            "stream, which goes to `new_prefix`.",
        ),
    ),
    constants=("rms_eps", "round_mix"),
    constants_when="mix_blocks",
    reference="reduce:o_reduce",
    kernel="o_reduce",
    release=Release.NEVER,
    limits=Limits(tp=False, divides=(("hidden", 8),)),
)

CONTRACTS = (PACKED_GEMM, GATE_GEMM, INDEX_GEMM, O_PROJ, O_REDUCE)
