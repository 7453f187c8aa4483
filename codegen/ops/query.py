"""Contracts of the query stage: q_a norm, attention query, KV insert, gathering of heads."""

from __future__ import annotations

from .contract import (
    Access,
    Contract,
    Derive,
    Flag,
    Limits,
    Release,
    cache,
    mailbox,
    reads,
    step,
    weight,
    writes,
)
from .types import HEADS, REPLICATED, SLOTS

QUERY_NORM = Contract(
    name="query_norm",
    doc="q_c = RMSNorm(q_a): FP32 sum of squares, (x * rsqrt) * weight, rounded to BF16.",
    operands=(
        reads("q_a", "rows, q_lora", "bf16", type=REPLICATED),
        weight("q_norm", "q_lora"),
        writes("q_c", "rows, q_lora", "bf16", type=REPLICATED),
    ),
    constants=("rms_eps",),
    reference="query:query_norm",
    kernel="rms_norm",
)

_QUERY_WEIGHTS = (
    weight("q_norm", "q_lora"),
    weight("kv_norm", "kv_lora"),
    weight("q_b", "heads * qk_head, q_lora"),
    weight("w_uk", "heads, nope, kv_lora"),
    weight("q_scale_inv", "1", "fp32"),
    weight("k_scale_inv", "1", "fp32"),
)

_QUERY_FLAGS = (
    Flag("dcp", Derive.CONTEXT_PARALLEL, doc="publishes its heads into every rank's mailbox"),
    Flag("polls", Derive.ONLY_POLLER, "q_mail", "also waits for every rank's heads"),
)

# Where the kernels round to BF16, and the shapes that their tiles cover.
_QUERY_ROUNDS = (("round_kv_norm", "bf16"), ("round_query_b", "bf16"), ("round_absorb", "bf16"))
_QUERY_LIMITS = Limits(
    cache_formats=("fp8_tensor", "fp8_ds_mla"),
    divides=(("q_lora", 32), ("kv_lora", 64), ("nope", 32), ("pe", 16)),
)

_GATHERED_QUERY = "rows_cap, tp * heads, latent"
# In the mailbox every rank holds the heads of all ranks.
_QUERY_OUTPUTS = (
    writes("query", "rows, heads, latent", "query", when="!dcp", type=HEADS),
    mailbox("q_mail", Access.PUBLISH, _GATHERED_QUERY, "query", when="dcp", type=REPLICATED),
)

MLA_QUERY = Contract(
    name="mla_query",
    doc="Attention query of this rank's heads and the KV insert: q_a and kv_a norms, Q_B, absorb "
    "W_UK, quantise; inserts latent | pe of each owned slot into the paged cache.",
    operands=(
        reads("q_a", "rows, q_lora", "bf16", type=REPLICATED),
        reads("kv_a", "rows, latent", "bf16", type=REPLICATED),
        step("slots", "rows", "i64", type=SLOTS, gates=("latent_kv",)),
        *_QUERY_WEIGHTS,
        cache("latent_kv", Access.INSERT),
        *_QUERY_OUTPUTS,
        writes("q_c", "rows, q_lora", "bf16", when="writes_q_c", type=REPLICATED),
    ),
    flags=(*_QUERY_FLAGS, Flag("writes_q_c", Derive.ONLY_WRITER, "q_c")),
    constants=("rms_eps", "nope", "pe", "rounds"),
    reference="query:mla_query",
    kernel="mla_query",
    proxy_fence=("latent_kv",),
    fixes=_QUERY_ROUNDS,
    limits=_QUERY_LIMITS,
    tile=("tokens", "parts"),
    tile_values=(("tokens", (64, 32, 16)), ("parts", (8, 4))),
)

MLA_QUERY_SPLIT = Contract(
    name="mla_query_split",
    doc="As mla_query, from the normed q_c: Q_B runs as its own tiled GEMM, which pays for more "
    "rows. It never polls.",
    operands=(
        reads("q_c", "rows, q_lora", "bf16", type=REPLICATED),
        reads("kv_a", "rows, latent", "bf16", type=REPLICATED),
        step("slots", "rows", "i64", type=SLOTS, gates=("latent_kv",)),
        *_QUERY_WEIGHTS[1:],
        cache("latent_kv", Access.INSERT),
        *_QUERY_OUTPUTS,
    ),
    flags=_QUERY_FLAGS[:1],
    constants=("rms_eps", "nope", "pe", "rounds"),
    reference="query:mla_query_split",
    kernel="mla_query_split",
    proxy_fence=("latent_kv",),
    fixes=_QUERY_ROUNDS,
    limits=_QUERY_LIMITS,
    tile=("tokens", "parts"),
    tile_values=(("tokens", (64, 32, 16)), ("parts", (8, 4))),
)

QUERY_WAIT = Contract(
    name="query_wait",
    doc="Polls this rank's query mailbox until every rank's heads of every row have arrived.",
    operands=(mailbox("q_mail", Access.POLL, _GATHERED_QUERY, "query", type=REPLICATED),),
    reference="query:query_wait",
    kernel="query_wait",
    takes_rows=True,
    release=Release.NEVER,
    limits=Limits(tp=False),
)

CONTRACTS = (QUERY_NORM, MLA_QUERY, MLA_QUERY_SPLIT, QUERY_WAIT)
