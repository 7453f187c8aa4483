"""Every rule: its code, its name, why it exists, an example that breaks it, the repair."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kpipe.codegen.rule import Rule
from kpipe.codegen.rules_memory import MEMORY_RULES
from kpipe.codegen.rules_schedule import SCHEDULE_RULES

__all__ = ["RULES", "Rule"]


_RULES = (
    Rule(
        "KP100",
        "input cannot be read",
        "A spec is one UTF-8 text file of at most 1 MiB. Anything else is refused before it is "
        "looked at, with the byte or the name that is in the way, because guessing an encoding "
        "would change names silently.",
        "kpipe check pipelines/dsa_tpp.yaml",
        "Name an existing file; save it as UTF-8 without control characters.",
    ),
    Rule(
        "KP101",
        "wrong key or wrong type",
        "Unknown keys are errors at any depth: a misspelt key would otherwise be a setting that "
        'silently has no effect. Types are strict, so the text "8" is not the number 8.',
        "stagess: {query: {ops: [mla_query]}}",
        "Use the key that the finding suggests, or the type that it names.",
    ),
    Rule(
        "KP102",
        "value outside its vocabulary",
        "Some keys take one of a few words. A word outside the list is never mapped to a default.",
        "numerics: {sigmoid: quick}",
        "Choose one of the words that the finding lists.",
    ),
    Rule(
        "KP103",
        "unknown name",
        "Ops, buffers, columns, modes, streams and geometries bind by name. A name that nothing "
        "declares, or that two stages claim, cannot be bound.",
        'overlap: {table: {"1-64": frok}}',
        "Correct the name, or declare what it stands for.",
    ),
    Rule(
        "KP104",
        "limit of an op, a mode or a target",
        "Every op states on which architectures, head counts, pages, formats, rows and query "
        "lengths it works. A launch outside these limits would fail on the machine, or worse, "
        "run and be wrong; a mode may also require features that the deployment lacks.",
        'variants: {core: {sm_90a: {"1-64": trtllm_gen}}}',
        "Choose another op in `variants`, another mode in the table, or name what replaces the "
        "mode under `fallback`.",
    ),
    Rule(
        "KP105",
        "not YAML",
        "The text cannot be parsed: a tab in the indentation, a bracket that is never closed, a "
        "list where one mapping is expected.",
        "name: x\n\tdoc: indented with a tab",
        "Repair the place; indent with spaces.",
    ),
    Rule(
        "KP106",
        "key written twice",
        "YAML readers usually keep the last of two equal keys, so half of an edit is lost without "
        "a word.",
        'rows: {batches: "1-8"}\nrows: {batches: "1-16"}',
        "Keep one of the two.",
    ),
    Rule(
        "KP107",
        "YAML outside the language",
        "Anchors, tags, several documents, and scalars that YAML versions read differently (on, "
        "off, yes, 010) are not part of the language: a spec must read the same from top to "
        "bottom for every reader.",
        "dims: {heads: 010}",
        "Write the value plainly: 10, true, or quoted text.",
    ),
    Rule(
        "KP108",
        "extends cannot be followed",
        "A spec may extend one other file of its project. Circles, long chains and paths that "
        "leave the project are refused, since a spec can come from a stranger.",
        "extends: ../../../etc/base.yaml",
        "Extend a file inside the project by a relative path.",
    ),
    Rule(
        "KP109",
        "declared and never used",
        "A key, a buffer, an op or a tactic that nothing reads is a mistake more often than a "
        "leftover: its author believes that it does something.",
        "buffers: {scratch: {shape: [rows], dtype: bf16}}   # no op binds it",
        "Delete it, or bind it.",
    ),
    Rule(
        "KP110",
        "parallelism and pages do not fit",
        "Ranks, interleave and page sizes must divide one another, and row ids are 32-bit: "
        "otherwise two ranks would claim one token, or an id would wrap.",
        "parallel: {tp: 8, dcp: 4}",
        "Choose sizes that divide as the finding says.",
    ),
    Rule(
        "KP111",
        "shape expression cannot be evaluated",
        "Shapes are whole-number expressions over the geometry. Unknown names, divisions with a "
        "remainder, circles, zero and negative sizes are refused; nothing is evaluated as Python.",
        "dims: {heads: heads_total / tp}   # 96 / 7",
        "Correct the expression, or choose a parallelism that divides it.",
    ),
    Rule(
        "KP112",
        "malformed mode",
        "A mode is a list of ops per stream with `fork STREAM` and `join STREAM`. A stream that "
        "is never forked would never run; one forked twice would run twice.",
        "fork: {main: [packed_gemm, core], side: [mla_query]}",
        "Fork the stream where it may start and join it where its results are needed.",
    ),
    Rule(
        "KP120",
        "malformed row range",
        "Row keys are counts and ranges of token rows: `4`, `5-64`, `9-`. The open form may only "
        "stand last.",
        'rows: {batches: "8-1"}',
        "Write the smaller count first and separate items by commas.",
    ),
    Rule(
        "KP121",
        "table has a gap",
        "Every table is total over the declared rows: a step without an entry would have to be "
        "guessed at run time.",
        'table: {"1-4": wait, "16-64": fork}   # 5-8 are declared',
        "Add the missing rows, or widen a neighbour.",
    ),
    Rule(
        "KP122",
        "rows listed twice",
        "Two entries for one row count leave it to the order of the file which one wins.",
        'table: {"1-8": wait, "8-64": fork}',
        "Let each row count fall into one entry.",
    ),
    Rule(
        "KP123",
        "entry selects nothing",
        "A key that no declared row count falls into has no effect, though its author expects one.",
        'rows: {batches: "1-8"}   # with table: {"1-8": wait, "9-64": fork}',
        "Declare the rows, or delete the entry.",
    ),
    Rule(
        "KP130",
        "not generated yet",
        "The language is larger than the generator. Such specs can be marked as a draft: names, "
        "shapes and modes are checked, nothing is generated.",
        'prefetch: [{after: core, weights: [o_proj.o_proj], rows: "1-8"}]',
        "Leave the section out, or add `draft: {missing: [...]}`.",
    ),
    Rule(
        "KP201",
        "missing, late or second writer",
        "In a mode each buffer has exactly one writer, complete before its readers start. "
        "Completeness follows from stream order, forks and joins, not from luck.",
        "main: [packed_gemm, core, mla_query]   # core reads the query first",
        "Reorder the ops, or join the writer's stream ahead of the reader.",
    ),
    Rule(
        "KP202",
        "shape or type mismatch",
        "An op and the buffer that it is bound to must agree on axes and dtype; a silent cast "
        "would move a rounding point.",
        "query: {shape: [rows, heads, kv_lora], dtype: fp8}   # the op writes latent",
        "Correct the declaration, or bind another buffer with `with`.",
    ),
    Rule(
        "KP210",
        "index of another space",
        "A token's position in its request, its position within one rank's share and its physical "
        "cache row are three numbers of one type. Taken for one another they read other tokens, "
        "and often existing ones.",
        "with: {selected: local_ids}   # the core expects physical cache rows",
        "Put the op between the two that the finding names, or bind the tensor that counts what "
        "the reader expects.",
    ),
    Rule(
        "KP211",
        "tensor of another placement",
        "A tensor can be the same on every rank, hold one rank's heads or share of the context, or "
        "be one rank's part of a sum. A part that is used as the whole gives plausible numbers.",
        "value: {ops: [mla_value], with: {gate: q_a}}   # q_a is replicated, the gate is not",
        "Put the op between the two that gathers or merges, or bind the right tensor.",
    ),
    Rule(
        "KP212",
        "mask of another domain",
        "A rank that does not store a row's new key still needs the row's query: every rank "
        "attends over its share. A mask that tells ownership may gate the insert into the cache, "
        "and nothing else; one that tells which rows have keys here may gate what is merged over "
        "the ranks.",
        "mla_query skips the query of rows whose slot is negative",
        "Let the mask gate what is stored by key; leave rows out by `lengths`, which every rank is "
        "told.",
    ),
    Rule(
        "KP213",
        "LSE of another base",
        "Cores write the log sum of exponentials to base 2 or to base e; between the two lies a "
        "factor of 1.44. A merge is told one base for the whole plan, so that the cores that feed "
        "it must agree.",
        'variants: {core: {sm_100a: {"1-64": [prims_ts, sparse_push]}}}   # base e and base 2',
        "Choose cores of one base.",
    ),
    Rule(
        "KP214",
        "row without keys left undefined",
        "A rank may hold none of a row's keys. Unless such a row is 0 with LSE -inf, or somebody "
        "who knows the count clears it, the merge gives weight to what happens to stand there.",
        "partial_mail written by a core whose rows without keys are undefined",
        "Choose a core that clears such rows, or let dcp_value push them: it clears by the count.",
    ),
    Rule(
        "KP215",
        "list of another format",
        "Lists of keys are shorter than their width in one of two ways: a compact prefix with its "
        "length, or -1 wherever a key is not this rank's. A core that counts on the prefix would "
        "read -1 as a cache row.",
        "selected written with holes, read by trtllm_gen",
        "Let an op compact the list, or choose a core that skips -1 anywhere.",
    ),
    Rule(
        "KP701",
        "mailbox read without a poll, or polled without a publish",
        "A mailbox is written by peers at their own pace. Without a poll the reader sees old "
        "words; a poll for words that this rank publishes later never ends on any rank.",
        "main: [mla_query, core, query_wait]   # core reads q_mail before the poll",
        "Order publish, poll and read as the finding says.",
    ),
    Rule(
        "KP702",
        "mailbox reused too early",
        "A rank that is ahead publishes a layer's words into the copy whose earlier words a slower "
        "rank has not taken yet. Parities give slack, and so does every exchange in between that "
        "all ranks must pass; the explorer tries every skew and prints the shortest way there.",
        "q_mail: {shape: [...], dtype: fp8, sentinel: 0xFFFFFFFF, parities: 1, ...}",
        "Raise `parities`, or end the layer with an exchange that every rank waits for.",
    ),
    Rule(
        "KP703",
        "sentinel can be data",
        'The data is its own ready flag: a word equal to the sentinel means "not there yet". If '
        "a payload can hold that word, the reader waits for ever.",
        "q_mail: {dtype: fp8, sentinel: 0}",
        "Choose one of the words that no payload of the dtype can hold.",
    ),
    Rule(
        "KP704",
        "mailbox re-armed by another op than declared",
        "After use somebody must store the sentinel back, exactly once and after the last reader; "
        "otherwise the next round reads this round's words as new.",
        "lse_mail: {rearmed_by: o_reduce}   # dcp_value stores the sentinel",
        "Name the op that re-arms it, or use the op that does.",
    ),
    Rule(
        "KP705",
        "mailbox used before it is armed",
        "A rank publishes while a peer still fills its mailbox with the sentinel; the fill erases "
        "the words, and the peer waits for ever.",
        "a first step that starts without a barrier over the ranks",
        "Fill every mailbox and synchronise all ranks before the first step.",
    ),
    Rule(
        "KP706",
        "ranks wait for each other",
        "Every rank polls words that some other rank publishes only later in its own order: none "
        "can go on.",
        "wait: {main: [query_wait, mla_query, core]}",
        "Put the op that publishes ahead of the one that polls.",
    ),
    Rule(
        "KP801",
        "unusable settings",
        "Settings stand in `[tool.kpipe]` of pyproject.toml or in kpipe.toml: `output`, "
        "`templates`, `pipelines`. Unknown keys and paths that leave the project are refused.",
        '[tool.kpipe]\noutptu = "generated"',
        "Correct the key or the path.",
    ),
    Rule(
        "KP802",
        "unknown environment variable",
        "A variable that looks like a setting of kpipe and is none would silently do nothing, and "
        "a benchmark would compare a thing with itself.",
        "KPIPE_OVERLAP=1-8:pdl kpipe generate pipelines/dsa_tp.yaml",
        "Unset it; only KPIPE_CACHE_DIR exists. Everything else is written in the spec.",
    ),
    Rule(
        "KP803",
        "generated file was edited by hand",
        "The manifest knows every byte that kpipe has written. Other bytes are somebody's work "
        "and are neither overwritten nor deleted without being told to.",
        "echo '# tuned' >> generated/dsa_tp/layer.py && kpipe generate pipelines/dsa_tp.yaml",
        "Move the edit into the spec or a template, delete the file, or pass --force.",
    ),
    Rule(
        "KP804",
        "manifest cannot be read",
        "Without the manifest kpipe cannot tell its own files from yours, for example after a "
        "merge that left conflict marks in it.",
        "<<<<<<< HEAD in generated/dsa_tp/manifest.json",
        "Restore it from version control, or pass --force to write every generated file anew.",
    ),
    Rule(
        "KP805",
        "writing failed",
        "Publishing is all or nothing. When the file system refuses a write, the files already "
        "replaced are put back.",
        "kpipe generate on a full disk",
        "Repair the cause (space, permissions) and generate again.",
    ),
    Rule(
        "KP806",
        "path outside the output root",
        "Generated files are plain files below the output root. A link in their place, or a name "
        "that leads elsewhere, could overwrite anything.",
        "ln -s /srv/engine generated/dsa_tp/kernels",
        "Remove the link, or choose another root with --out.",
    ),
    Rule(
        "KP807",
        "two specs, one folder",
        "The folder is named after the pipeline. Two specs with one name would overwrite each "
        "other's output in turn.",
        "cp pipelines/dsa_tp.yaml pipelines/variant.yaml && kpipe generate pipelines/variant.yaml",
        "Give the copy another `name`.",
    ),
    Rule(
        "KP808",
        "selection is not declared",
        "`plan`, `why`, `modes` and `show` answer for rows, stages, ops and modes that the spec "
        "declares. They do not invent others: at run time rows are padded to the next declared "
        "count, and anything larger is refused.",
        "kpipe plan pipelines/dsa_tp.yaml --rows 9",
        "Select one of the listed values, or declare it in the spec.",
    ),
    Rule(
        "KP809",
        "semantics table cannot be used",
        "Findings cite rows of a table of measured semantics. A table that lacks rows, has keys of "
        "another version or is not there would make them cite nothing.",
        '[tool.kpipe] semantics = "measured/h100.json", which does not exist',
        "Name a table of the version that the finding asks for, or drop the setting to cite the "
        "one that ships.",
    ),
    Rule(
        "KP820",
        "observations cannot be used",
        "`probe --apply`, `verify-capture --captured` and `tune apply` judge files that come back "
        "from the machine with the GPU. A file of another kind or version, or one that lacks rows "
        "or names what was never planned, says nothing.",
        "kpipe probe --apply plan.json",
        "Measure again with the same version of kpipe.",
    ),
    Rule(
        "KP821",
        "documented order was seen broken",
        "The checker proves schedules from what the documents promise. On the machine that was "
        "measured a reader saw old data although they order it, or a capture gave another graph "
        "than the rules say: proofs mean nothing there.",
        "row 2 (A(trig); C(pdl wait)), captured: C saw old data behind its wait in 3 of 40",
        "Measure again. If it stays, report it with the file, the GPU and the driver.",
    ),
    Rule(
        "KP822",
        "tuning results do not fit the spec",
        "Times hold for the schedules and kernels that were measured. Where the spec, its "
        "geometry, a mode or a kernel has changed since the plan, or a table selects neither what "
        "the run compared with nor what won, the winner says nothing. Only the named file is "
        "edited, and no comment of it is lost.",
        "kpipe tune apply pipelines/dsa_tp.yaml results.json, after an edit of `numerics`",
        "Plan and measure again; where the text cannot be edited, write the winners by hand.",
    ),
)

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.code: rule
        for rule in sorted((*_RULES, *SCHEDULE_RULES, *MEMORY_RULES), key=lambda rule: rule.code)
    }
)
