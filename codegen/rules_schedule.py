"""The rules of streams, overlap and graphs (KP3xx, KP5xx)."""

from __future__ import annotations

from kpipe.codegen.rule import Rule

SCHEDULE_RULES = (
    Rule(
        "KP301",
        "read before the write is over",
        "An op reads memory that another op, of this layer, of a neighbouring layer or of the next "
        "step, may still be writing: no chain of stream order, joins and waits leads from the end "
        "of the write to the beginning of the read, eagerly or captured into a graph.",
        "fork: {main: [packed_gemm, fork side, query_norm, core, join side], side: [mla_query]}",
        "Join the writer's stream ahead of the reader, or put both on one stream.",
    ),
    Rule(
        "KP302",
        "rewritten before it has been read",
        "Scratch is shared by all layers of a kind. An op rewrites it while an earlier op, often "
        "of the layer before, may still be reading: the classic hazard of a side stream that is "
        "joined too late, or of a neighbour that never waits.",
        "environment: {between_layers: silent}",
        "Join the reader's stream ahead of the writer, or declare what runs between the layers.",
    ),
    Rule(
        "KP303",
        "two writes without an order",
        "Two ops write the same memory and nothing says which comes first, so what stays there is "
        "chance.",
        "environment: {between_layers: silent}",
        "Order the two ops, or give one of them a buffer of its own.",
    ),
    Rule(
        "KP306",
        "stream is never joined",
        "Work left in flight on a side stream outlives the layer: capture into a graph fails, and "
        "the next layer overwrites scratch that is still being read.",
        "fork: {main: [packed_gemm, fork side, core], side: [mla_query]}",
        "Write `join STREAM` ahead of the first op that needs its results.",
    ),
    Rule(
        "KP307",
        "stores that TMA does not see yet",
        "Plain stores and TMA reach memory through two proxies. A kernel that starts by an early "
        "trigger is ordered behind the writer by its wait, and its TMA reads still found old bytes "
        "in a measured case: there is no fence between the proxies, and no kernel boundary either.",
        "a quantiser triggers early without a proxy fence, and the GEMM behind it reads by TMA",
        "Fence between the proxies in front of the trigger and declare `proxy_fence`, or hold the "
        "release with `pdl: {OP: hold}`.",
    ),
    Rule(
        "KP501",
        "graph replayed on a stream per layer",
        "Where branches of a captured graph meet, a replay goes on in the lane of the branch that "
        "was recorded first. A side stream that is issued ahead of the work beside it moves the "
        "main chain to a new lane in every layer. Results are the same; only time is lost. The "
        "rule is observed and written down nowhere, so this is a warning.",
        "fork: {main: [packed_gemm, fork side, issue side, query_norm, join side, core], "
        "side: [mla_query]}",
        "Delete `issue STREAM`: a stream is issued right ahead of its join.",
    ),
)
