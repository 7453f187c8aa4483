"""Contracts of the value stage: merge of the ranks' partials, W_UV, output gate."""

from __future__ import annotations

from .contract import (
    Access,
    Contract,
    Derive,
    Flag,
    Limits,
    Release,
    mailbox,
    reads,
    step,
    weight,
    writes,
)
from .types import COUNTS, HEADS, LENGTHS, EmptyRow, Placement, ValueType

# Rows without keys may hold anything: they are selected to zero behind these reads, by `lengths`
# where the rank sees the whole context, by `valid` where it pushes its share.
_LATENT = ValueType(placement=Placement.HEAD_SHARDED, empty=EmptyRow.UNDEFINED)
_LOCAL = ValueType(placement=Placement.GATHERED, empty=EmptyRow.UNDEFINED)
# In the mailboxes nobody can tell any more: the merge weighs a row by its LSE alone.
_SENT = ValueType(placement=Placement.PARTIAL, empty=EmptyRow.ZERO_NEG_INF)

MLA_VALUE = Contract(
    name="mla_value",
    doc="v = BF16(W_UV^T . latent), out = BF16(v * sigmoid(gate)); a row without keys is set to "
    "zero by selection, whatever its gate holds.",
    operands=(
        reads("latent", "rows, heads, kv_lora", "bf16", type=_LATENT),
        reads("gate", "rows, heads * v_dim", "bf16", type=HEADS),
        step("lengths", "requests", "i32", type=LENGTHS, gates=("gated",)),
        weight("w_uv", "heads, v_dim, kv_lora"),
        writes("gated", "rows, heads * v_dim", "bf16", type=HEADS),
    ),
    constants=("rounds", "sigmoid"),
    reference="value:mla_value",
    kernel="mla_value",
    fixes=(("round_value", "bf16"),),
    release=Release.AFTER_WEIGHTS,  # with `early`; the weaker promise serves both
    limits=Limits(dcp=False, divides=(("kv_lora", 32), ("v_dim", 32))),
    tile=("early",),
    tile_values=(("early", (0, 1)),),
)

VALUE_BMM = Contract(
    name="value_bmm",
    doc="v = BF16(W_UV^T . latent) as one batched library GEMM, for many rows.",
    source="torch",
    operands=(
        reads("latent", "rows, heads, kv_lora", "bf16", type=_LATENT),
        weight("w_uv", "heads, v_dim, kv_lora"),
        writes("values", "heads, rows, v_dim", "bf16", type=_LATENT),
    ),
    reference="value:value_bmm",
    waits=False,
    release=Release.LIBRARY,
    limits=Limits(dcp=False),
)

MLA_GATE = Contract(
    name="mla_gate",
    doc="out = BF16(v * sigmoid(gate)), zero for rows without keys; behind value_bmm.",
    operands=(
        reads("values", "heads, rows, v_dim", "bf16", type=_LATENT),
        reads("gate", "rows, heads * v_dim", "bf16", type=HEADS),
        step("lengths", "requests", "i32", type=LENGTHS, gates=("gated",)),
        writes("gated", "rows, heads * v_dim", "bf16", type=HEADS),
    ),
    constants=("sigmoid",),
    reference="value:mla_gate",
    kernel="mla_gate",
    release=Release.AFTER_LOADS,
    limits=Limits(dcp=False),
)

DCP_VALUE = Contract(
    name="dcp_value",
    doc="Re-arms the query mailbox, pushes every head's local row and LSE to the head's owner, "
    "merges the ranks' rows by LSE weight in source order, then W_UV and gate. Rows whose global "
    "length is zero are selected to zero.",
    operands=(
        reads("partial", "rows, tp * heads, kv_lora", "bf16", when="pushes", type=_LOCAL),
        reads("partial_lse", "rows, tp * heads", "fp32", when="pushes", type=_LOCAL),
        reads("valid", "rows", "i32", type=COUNTS, gates=("partial_mail", "lse_mail")),
        reads("gate", "rows, heads * v_dim", "bf16", type=HEADS),
        step("lengths", "requests", "i32", type=LENGTHS, gates=("gated",)),
        weight("w_uv", "heads, v_dim, kv_lora"),
        mailbox("q_mail", Access.REARM, "rows_cap, tp * heads, latent", "query"),
        mailbox(
            "partial_mail", Access.EXCHANGE, "dcp, rows_cap, heads, kv_lora", "bf16", type=_SENT
        ),
        mailbox("lse_mail", Access.EXCHANGE, "dcp, rows_cap, heads", "fp32", type=_SENT),
        writes("gated", "rows, heads * v_dim", "bf16", type=HEADS),
    ),
    flags=(Flag("pushes", Derive.ONLY_WRITER, "partial_mail", "the core has not pushed already"),),
    constants=("shard", "lse_base", "rounds", "sigmoid"),
    reference="value:dcp_value",
    kernel="dcp_value",
    fixes=(("round_merged", "bf16"), ("round_value", "bf16")),
    limits=Limits(tp=False, divides=(("kv_lora", 32), ("v_dim", 8))),
    release=Release.NEVER,
)

DCP_VALUE_PROJECTED = Contract(
    name="dcp_value_projected",
    doc="As dcp_value, with W_UV of all heads ahead of the push: a head's row travels as v_dim "
    "values in place of kv_lora latents, rounded to BF16; the merge weighs those and rounds once, "
    "then comes the gate.",
    operands=(
        reads("partial", "rows, tp * heads, kv_lora", "bf16", type=_LOCAL),
        reads("partial_lse", "rows, tp * heads", "fp32", type=_LOCAL),
        reads("valid", "rows", "i32", type=COUNTS, gates=("partial_mail", "lse_mail")),
        reads("gate", "rows, heads * v_dim", "bf16", type=HEADS),
        step("lengths", "requests", "i32", type=LENGTHS, gates=("gated",)),
        weight("w_uv_all", "tp * heads, v_dim, kv_lora"),
        mailbox("q_mail", Access.REARM, "rows_cap, tp * heads, latent", "query"),
        mailbox("partial_mail", Access.EXCHANGE, "dcp, rows_cap, heads, v_dim", "bf16", type=_SENT),
        mailbox("lse_mail", Access.EXCHANGE, "dcp, rows_cap, heads", "fp32", type=_SENT),
        writes("gated", "rows, heads * v_dim", "bf16", type=HEADS),
    ),
    constants=("shard", "lse_base", "rounds", "sigmoid"),
    reference="value:dcp_value_projected",
    kernel="dcp_value_projected",
    fixes=(("round_merged", "bf16"),),
    limits=Limits(tp=False, divides=(("kv_lora", 32), ("v_dim", 8)), sent=("value",)),
    release=Release.NEVER,
)

CONTRACTS = (MLA_VALUE, VALUE_BMM, MLA_GATE, DCP_VALUE, DCP_VALUE_PROJECTED)
