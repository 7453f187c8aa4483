"""The ops of dsa_tp_modes: every op of every declared mode, selected or not.

Generated from pipelines/dsa_tp_modes.yaml; do not edit.
"""

from __future__ import annotations

from kpipe.runtime.op import Op
from kpipe.runtime.reference import indexer, projection, query, select, sparse_core, value
from kpipe.runtime.reference.numerics import Rounds

# Geometry kimi_k31, tp 8.
GATE_COLUMNS = (2112, 3648)
INDEX_DIM = 128
INDEX_EPS = 1e-06
INDEX_HEADS = 32
KV_LORA = 512
NOPE = 128
PE = 64
RMS_EPS = 1e-06
SOFTMAX_SCALE = 0.07216878364870322
TOP_K = 2048
ROUNDS = Rounds(
    kv_norm="bf16",
    query_b="bf16",
    absorb="bf16",
    merged="bf16",
    value="bf16",
)

OPS = (
    Op(
        name="dsa_index",
        stage="indexer",
        reference=indexer.dsa_index,
        weights=("index_k_norm", "index_k_bias"),
        constants={
            "index_eps": INDEX_EPS,
            "index_heads": INDEX_HEADS,
            "index_dim": INDEX_DIM,
            "index_quant": "ue8m0",
        },
        kernel="dsa_index:DsaIndex",
    ),
    Op(
        name="gate_gemm",
        stage="projection",
        reference=projection.gate_gemm,
        weights=("packed",),
        constants={"gate_columns": GATE_COLUMNS},
        kernel="gate_gemm:GateGemm",
        tactics={
            ("sm_90a", 1): {"tile_n": 24, "tokens": 8, "ring": 112},
            ("sm_90a", 4): {"tile_n": 32, "tokens": 8, "ring": 72},
            ("sm_90a", 8): {"tile_n": 24, "tokens": 8, "ring": 112},
            ("sm_90a", 16): {"tile_n": 24, "tokens": 16, "ring": 112},
            ("sm_90a", 32): {"tile_n": 32, "tokens": 32, "ring": 112},
            ("sm_90a", 64): {"tile_n": 32, "tokens": 64, "ring": 112},
            ("sm_100a", 8): {"tile_n": 32, "tokens": 8, "ring": 112},
            ("sm_100a", 16): {"tile_n": 32, "tokens": 16, "ring": 112},
            ("sm_100a", 32): {"tile_n": 32, "tokens": 32, "ring": 112},
            ("sm_100a", 64): {"tile_n": 32, "tokens": 64, "ring": 112},
        },
    ),
    Op(
        name="index_front",
        stage="indexer",
        reference=indexer.index_front,
        weights=("q_norm", "index_q_b", "index_k_norm", "index_k_bias"),
        constants={
            "rms_eps": RMS_EPS,
            "index_eps": INDEX_EPS,
            "index_heads": INDEX_HEADS,
            "index_dim": INDEX_DIM,
            "index_quant": "ue8m0",
        },
        kernel="index_front:IndexFront",
        tactics={
            ("sm_90a", 8): {"tile_n": 64, "tokens": 8, "held": 8},
            ("sm_90a", 16): {"tokens": 16},
            ("sm_90a", 64): {"tokens": 64},
            ("sm_100a", 8): {"tile_n": 64, "tokens": 8, "held": 8},
            ("sm_100a", 16): {"tokens": 16},
            ("sm_100a", 64): {"tokens": 64},
        },
    ),
    Op(
        name="index_gemm",
        stage="indexer",
        reference=projection.index_gemm,
        weights=("index_q_b",),
        kernel="index_gemm:IndexGemm",
        tactics={
            ("sm_90a", 4): {"tile_n": 32, "tokens": 8},
            ("sm_90a", 8): {"tile_n": 128, "tokens": 8},
            ("sm_90a", 16): {"tile_n": 128, "tokens": 16},
            ("sm_90a", 32): {"tile_n": 64, "tokens": 32},
            ("sm_90a", 64): {"tile_n": 64, "tokens": 64},
            ("sm_100a", 8): {"tile_n": 32, "tokens": 8},
            ("sm_100a", 16): {"tile_n": 32, "tokens": 16},
            ("sm_100a", 32): {"tile_n": 32, "tokens": 32},
            ("sm_100a", 64): {"tile_n": 32, "tokens": 64},
        },
    ),
    Op(
        name="index_scores",
        stage="indexer",
        reference=indexer.index_scores,
        needs_shard=True,
        kernel="index_scores:IndexScores",
        tactics={
            ("sm_90a", 4): {"ctas": 84},
            ("sm_90a", 8): {"ctas": 132, "ahead": 84, "lead": 28},
            ("sm_90a", 16): {"ctas": 132},
            ("sm_90a", 64): {"ctas": 132, "ahead": 84, "lead": 28},
            ("sm_100a", 64): {"ctas": 132},
        },
    ),
    Op(
        name="mla_gate",
        stage="value",
        reference=value.mla_gate,
        constants={"sigmoid": "refined"},
        kernel="mla_gate:MlaGate",
    ),
    Op(
        name="mla_query",
        stage="query",
        reference=query.mla_query,
        weights=("q_norm", "kv_norm", "q_b", "w_uk", "q_scale_inv", "k_scale_inv"),
        constants={"rms_eps": RMS_EPS, "nope": NOPE, "pe": PE, "rounds": ROUNDS},
        kernel="mla_query:MlaQuery",
        tactics={
            ("sm_90a", 8): {"tokens": 16, "parts": 4},
            ("sm_90a", 16): {"tokens": 16},
            ("sm_90a", 32): {"tokens": 32, "parts": 4},
            ("sm_90a", 64): {"tokens": 64},
            ("sm_100a", 64): {"tokens": 64},
        },
    ),
    Op(
        name="mla_query_split",
        stage="query",
        reference=query.mla_query_split,
        weights=("kv_norm", "q_b", "w_uk", "q_scale_inv", "k_scale_inv"),
        constants={"rms_eps": RMS_EPS, "nope": NOPE, "pe": PE, "rounds": ROUNDS},
        kernel="mla_query_split:MlaQuerySplit",
        tactics={
            ("sm_90a", 64): {"tokens": 64, "parts": 4},
            ("sm_100a", 64): {"tokens": 64},
        },
    ),
    Op(
        name="mla_value",
        stage="value",
        reference=value.mla_value,
        weights=("w_uv",),
        constants={"rounds": ROUNDS, "sigmoid": "refined"},
        kernel="mla_value:MlaValue",
        tactics={
            ("sm_90a", 64): {"early": 1},
            ("sm_100a", 64): {"early": 0},
        },
    ),
    Op(
        name="o_proj",
        stage="o_proj",
        reference=projection.o_proj,
        weights=("o_proj",),
        kernel="o_proj:OProj",
        tactics={
            ("sm_90a", 4): {"tile_n": 64, "tokens": 8, "window": 64},
            ("sm_90a", 8): {"tile_n": 96, "tokens": 8, "window": 96},
            ("sm_90a", 16): {"tile_n": 64, "tokens": 16, "window": 64},
            ("sm_90a", 32): {"tile_n": 64, "tokens": 32, "window": 64},
            ("sm_90a", 64): {"tile_n": 64, "tokens": 64, "window": 64},
            ("sm_100a", 8): {"tile_n": 64, "tokens": 8},
            ("sm_100a", 16): {"tile_n": 64, "tokens": 16},
            ("sm_100a", 32): {"tile_n": 64, "tokens": 32},
            ("sm_100a", 64): {"tile_n": 64, "tokens": 64},
        },
    ),
    Op(
        name="packed_gemm",
        stage="projection",
        reference=projection.packed_gemm,
        weights=("packed",),
        constants={"gate_columns": GATE_COLUMNS},
        kernel="packed_gemm:PackedGemm",
        tactics={
            ("sm_90a", 1): {"tile_n": 24, "tokens": 8, "ring": 227, "window": 96},
            ("sm_90a", 4): {"tile_n": 24, "tokens": 8, "ring": 227, "window": 64},
            ("sm_90a", 8): {"tile_n": 32, "tokens": 8, "ring": 227, "window": 96},
            ("sm_90a", 16): {"tile_n": 24, "tokens": 16, "window": 96},
            ("sm_90a", 32): {"tile_n": 32, "tokens": 32, "window": 96},
            ("sm_90a", 64): {"tile_n": 32, "tokens": 64, "window": 64},
            ("sm_100a", 8): {"tile_n": 32, "tokens": 8, "ring": 104},
            ("sm_100a", 16): {"tile_n": 32, "tokens": 16},
            ("sm_100a", 32): {"tile_n": 32, "tokens": 32},
            ("sm_100a", 64): {"tile_n": 32, "tokens": 64},
        },
    ),
    Op(
        name="prims_ts",
        stage="sparse_core",
        reference=sparse_core.sparse_decode,
        weights=("q_scale", "k_scale"),
        constants={"softmax_scale": SOFTMAX_SCALE, "kv_lora": KV_LORA, "lse_base": "e"},
        source="flashinfer",
    ),
    Op(
        name="query_norm",
        stage="query",
        reference=query.query_norm,
        weights=("q_norm",),
        constants={"rms_eps": RMS_EPS},
        kernel="rms_norm:RmsNorm",
    ),
    Op(
        name="sparse_decode",
        stage="sparse_core",
        reference=sparse_core.sparse_decode,
        weights=("q_scale", "k_scale"),
        constants={"softmax_scale": SOFTMAX_SCALE, "kv_lora": KV_LORA, "lse_base": "2"},
        kernel="sparse_decode:SparseDecode",
        tactics={
            ("sm_90a", 4): {"splits": 16},
            ("sm_90a", 8): {"splits": 8},
            ("sm_90a", 16): {"splits": 6},
            ("sm_90a", 32): {"splits": 3},
            ("sm_90a", 64): {"splits": 2},
            ("sm_100a", 4): {"splits": 16},
            ("sm_100a", 8): {"splits": 8},
            ("sm_100a", 16): {"splits": 6},
            ("sm_100a", 32): {"splits": 3},
            ("sm_100a", 64): {"splits": 2},
        },
    ),
    Op(
        name="topk_select",
        stage="indexer",
        reference=select.topk_select,
        constants={"top_k": TOP_K, "tie": "low_id"},
        kernel="topk_select:TopkSelect",
        tactics={
            ("sm_90a", 1): {"parts": 8, "threads": 512},
            ("sm_90a", 8): {"parts": 8, "threads": 1024},
            ("sm_90a", 32): {"parts": 4, "threads": 1024},
            ("sm_90a", 64): {"parts": 2, "threads": 1024},
            ("sm_100a", 8): {"parts": 8, "threads": 1024},
            ("sm_100a", 32): {"parts": 4, "threads": 1024},
            ("sm_100a", 64): {"parts": 2, "threads": 1024},
        },
    ),
    Op(
        name="trtllm_gen",
        stage="sparse_core",
        reference=sparse_core.sparse_decode,
        weights=("q_scale", "k_scale"),
        constants={"softmax_scale": SOFTMAX_SCALE, "kv_lora": KV_LORA, "lse_base": "2"},
        source="flashinfer",
    ),
    Op(
        name="value_bmm",
        stage="value",
        reference=value.value_bmm,
        weights=("w_uv",),
        source="torch",
    ),
)
