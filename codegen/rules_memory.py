"""Rules about memory: storage, allocators, workspaces, zeroed counters, shared buffers."""

from __future__ import annotations

from kpipe.codegen.rule import Rule

MEMORY_RULES = (
    Rule(
        "KP601",
        "two live buffers share storage",
        "A schedule is proved for names. Two names on the same bytes make every order between "
        "their ops that was not needed by name necessary after all. The language has no way to lay "
        "one buffer over another, so this can only come from the tensors that an engine hands in: "
        "prepare() and run() compare every byte range.",
        "step.out = step.hidden   # packed_gemm may still read what o_proj writes",
        "Hand in tensors that do not overlap; columns of one buffer are said with `columns`.",
    ),
    Rule(
        "KP602",
        "handed out again while a stream still reads",
        "A caching allocator hands a block on as soon as the host has given it back, to whatever "
        "comes next on the stream that owns it. Events order kernels and say nothing to it: a "
        "reader on another stream must be joined into the owner's stream first.",
        "k = alloc() on side; idx(k) on main behind an event; del k   # main is never joined back",
        "Join the reader's stream into the owner's, or keep the buffer in memory of the plan.",
    ),
    Rule(
        "KP603",
        "one workspace, two launches at once",
        "An op has one workspace for all its launches. Partial sums and arrival counters of two "
        "launches that nothing orders, on two streams or in two layers, count in the same words.",
        "topk_a on main and topk_b on side, both in workspace `topk.counters`",
        "Put both on one stream, or join the first one's stream ahead of the second.",
    ),
    Rule(
        "KP605",
        "zeroed memory with a second owner",
        "Counters that reset themselves are cleared once and must be zero whenever their kernel "
        "begins. Anybody else who uses the bytes as scratch leaves them dirty, and then order is "
        "no help.",
        "prefill writes the workspace, decode expects zeros in its first 8 MiB",
        "Give each its own memory, or clear what both use between the two.",
    ),
    Rule(
        "KP606",
        "given back under a captured graph",
        "A graph has baked in the addresses that it was captured with. Memory that is given back "
        "or replaced by a larger block afterwards is read and written by every later replay, "
        "whoever owns it by then.",
        "arena = alloc(larger)   # a graph captured before keeps the old address",
        "Size memory for the largest declared step ahead of the first capture, and keep it.",
    ),
    Rule(
        "KP607",
        "shared buffers, different neighbours",
        "Pipelines that share a buffer run in turn in one step, so what runs between their layers "
        "is one thing. Two declarations of it cannot both hold, and each pipeline's overlap was "
        "decided by its own.",
        "a.yaml: between_layers: waits   # b.yaml, which shares a buffer: between_layers: silent",
        "Declare the same `between_layers` in all pipelines that share a buffer.",
    ),
)
