"""What dsa_dcp_d2_interleave64 reads and writes: weights, step tensors, caches, buffers, mailboxes.

Generated from pipelines/dsa_dcp_d2_interleave64.yaml; do not edit.
"""

from __future__ import annotations

from kpipe.runtime.comm.mailbox import MailboxSpec
from kpipe.runtime.memory import Memory
from kpipe.runtime.metadata import DTYPES, BufferSpec, CacheSpec, TensorSpec

# Geometry kimi_k31, tp 2.
TP = 2
DCP = 2
HIDDEN = 7168
HEADS_TOTAL = 96
Q_LORA = 1536
KV_LORA = 512
NOPE = 128
PE = 64
V_DIM = 128
INDEX_HEADS = 32
INDEX_DIM = 128
TOP_K = 2048
CONTEXT = 131072
LATENT = 576
QK_HEAD = 192
HEADS = 48
PITCH = 8416
ROWS_CAP = 64

MEMORY = Memory(
    weights={
        "index_k_bias": TensorSpec((INDEX_DIM,), "fp32"),
        "index_k_norm": TensorSpec((INDEX_DIM,), "fp32"),
        "index_q_b": TensorSpec((INDEX_HEADS * INDEX_DIM, Q_LORA), "bf16"),
        "k_scale": TensorSpec((1,), "fp32"),
        "k_scale_inv": TensorSpec((1,), "fp32"),
        "kv_norm": TensorSpec((KV_LORA,), "bf16"),
        "o_proj": TensorSpec((HIDDEN, HEADS * V_DIM), "bf16"),
        "packed": TensorSpec((PITCH, HIDDEN), "bf16"),
        "q_b": TensorSpec((HEADS * QK_HEAD, Q_LORA), "bf16"),
        "q_norm": TensorSpec((Q_LORA,), "bf16"),
        "q_scale": TensorSpec((1,), "fp32"),
        "q_scale_inv": TensorSpec((1,), "fp32"),
        "w_uk": TensorSpec((HEADS, NOPE, KV_LORA), "bf16"),
        "w_uv": TensorSpec((HEADS, V_DIM, KV_LORA), "bf16"),
    },
    step={
        "block_table": TensorSpec(("requests", "pages"), "i32"),
        "hidden": TensorSpec(("rows", HIDDEN), "bf16"),
        "index_slots": TensorSpec(("rows",), "i64"),
        "index_table": TensorSpec(("requests", "index_pages"), "i32"),
        "lengths": TensorSpec(("requests",), "i32"),
        "out": TensorSpec(("rows", HIDDEN), "bf16"),
        "slots": TensorSpec(("rows",), "i64"),
    },
    caches={
        "latent_kv": CacheSpec("fp8_tensor", 64),
        "index_kv": CacheSpec("index_fp8", 64),
    },
    buffers={
        "projected": BufferSpec(
            ("rows", PITCH),
            "bf16",
            columns={
                "q_a": (0, 1536),
                "kv_a": (1536, 576),
                "gate": (2112, 6144),
                "wk": (8256, 128),
                "wv": (8384, 32),
            },
        ),
        "q_c": BufferSpec(("rows", Q_LORA), "bf16"),
        "index_q": BufferSpec(("rows", INDEX_HEADS * INDEX_DIM), "bf16"),
        "index_q8": BufferSpec(("rows", INDEX_HEADS, INDEX_DIM), "fp8"),
        "index_w": BufferSpec(("rows", INDEX_HEADS), "fp32"),
        "scores": BufferSpec(("rows", CONTEXT), "fp32"),
        "selected": BufferSpec(("rows", TOP_K), "i32"),
        "valid": BufferSpec(("rows",), "i32"),
        "partial": BufferSpec(("rows", TP * HEADS, KV_LORA), "bf16"),
        "partial_lse": BufferSpec(("rows", TP * HEADS), "fp32"),
        "gated": BufferSpec(("rows", HEADS * V_DIM), "bf16"),
    },
    mailboxes={
        "q_mail": MailboxSpec(
            "q_mail",
            (ROWS_CAP, TP * HEADS, LATENT),
            DTYPES["fp8"],
            0xFFFFFFFF,
            parities=2,
            source_axis=1,
            source_stride=48,
        ),
        "candidates": MailboxSpec(
            "candidates",
            (DCP, ROWS_CAP, TOP_K, 2),
            DTYPES["i32"],
            0xFFFFFFFF,
            parities=2,
            source_axis=0,
            source_stride=1,
        ),
        "partial_mail": MailboxSpec(
            "partial_mail",
            (DCP, ROWS_CAP, HEADS, KV_LORA),
            DTYPES["bf16"],
            0x80000000,
            parities=2,
            source_axis=0,
            source_stride=1,
        ),
        "lse_mail": MailboxSpec(
            "lse_mail",
            (DCP, ROWS_CAP, HEADS),
            DTYPES["fp32"],
            0xFFFFFFFF,
            parities=2,
            source_axis=0,
            source_stride=1,
        ),
        "o_mail": MailboxSpec(
            "o_mail",
            (TP, ROWS_CAP, HIDDEN),
            DTYPES["bf16"],
            0x80000000,
            parities=2,
            source_axis=0,
            source_stride=1,
        ),
        "o_gather": MailboxSpec(
            "o_gather",
            (ROWS_CAP, HIDDEN),
            DTYPES["bf16"],
            0x80000000,
            parities=2,
            source_axis=1,
            source_stride=3584,
        ),
    },
    geometry={
        "hidden": HIDDEN,
        "heads_total": HEADS_TOTAL,
        "q_lora": Q_LORA,
        "kv_lora": KV_LORA,
        "pe": PE,
        "nope": NOPE,
        "v_dim": V_DIM,
        "index_heads": INDEX_HEADS,
        "index_dim": INDEX_DIM,
        "top_k": TOP_K,
        "rms_eps": 1e-06,
        "index_eps": 1e-06,
        "softmax_scale": 0.07216878364870322,
    },
)
