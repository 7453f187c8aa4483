"""Mistakes that others have reported in public, as specs: each is refused before it can run.

One test per case, named after it.  The codes suggested by the collection of cases map to ours:

    SP-OFFSET-WIDTH  KP110   SP-ROOT         KP107   SP-KEY           KP101, KP802
    SP-HEADS         KP104   SP-DUPKEY       KP106   SP-TABLE-GAP     KP121
    SP-PAGE          KP110   SP-ARCH         KP104   SP-TABLE-OVERLAP KP122
    SP-DERIVED       KP111   SP-CAPTURE-GAP  not needed: the declared rows are what is captured
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from spec_project import findings_edited, make_project, plan_edited, plan_of

from kpipe.codegen.config import check_environment
from kpipe.codegen.diagnostics import Diagnostic, SpecError
from kpipe.codegen.plan.api import resolve_spec
from kpipe.codegen.plan.build import build_plan
from kpipe.codegen.plan.report import Report
from kpipe.codegen.spec.document import find, read_document
from kpipe.codegen.spec.expressions import evaluate, parse
from kpipe.codegen.spec.rows import check_table, lookup, parse_rows

LATENT = "latent_kv: {format: fp8_tensor, page: 64}"
TARGETS = "targets: [sm_90a, sm_100a]"
DCP = "parallel: {tp: 8, dcp: 8, interleave: 1, transport: peer_store}"


def one(found: tuple[Diagnostic, ...]) -> tuple[str, str]:
    """Code and message of the only finding."""
    (finding,) = found
    return finding.code, finding.message


def cache_of(tmp_path: Path, text: str) -> tuple[Diagnostic, ...]:
    return findings_edited(
        tmp_path, "dsa_tp", (LATENT, f"latent_kv: {{format: fp8_tensor, {text}}}")
    )


def test_D22_row_ids_that_32_bits_cannot_hold(tmp_path: Path) -> None:
    """Rows are addressed as block * page + offset; their ids are int32, byte offsets are not."""
    assert cache_of(tmp_path / "a", "page: 2048, max_blocks: 1048576") == ()
    found = cache_of(tmp_path / "b", "page: 2048, max_blocks: 1048577")
    assert one(found) == (
        "KP110",
        "cache `latent_kv`: 1048577 blocks of 2048 rows end at row 2147485695, beyond the row "
        "ids' limit 2147483647",
    )
    assert found[0].help == "at most 1048576 blocks fit"


def test_D22_the_cache_of_the_report_needs_no_32_bit_offset(tmp_path: Path) -> None:
    """2000 pages of 2048 rows of 576 bytes are 2359296000 bytes: row ids stay small."""
    assert 2000 * 2048 * 576 - 1 == 2359295999 > 2**31 - 1
    assert cache_of(tmp_path, "page: 2048, max_blocks: 2000") == ()


def test_D29_head_rows_are_a_rule_and_not_a_gap(tmp_path: Path) -> None:
    """Eight ranks of 12 heads gather to 96: padded to 128 by cores that take <= 64 or 128."""
    make_project(tmp_path)
    plan = plan_of(tmp_path, "dsa_dcp")
    rows = {dict(s.cores)["core"]: s.head_rows for s in plan.plans}
    assert rows == {"sparse_decode": 96, "prims_ts": 128, "trtllm_gen": 128}


def test_D29_head_counts_beyond_the_largest_tile_are_refused(tmp_path: Path) -> None:
    root = make_project(
        tmp_path, [("geometry/kimi_k31.yaml", "heads_total: 96", "heads_total: 192")]
    )
    with pytest.raises(SpecError) as caught:
        plan_of(root, "dsa_dcp")
    assert {d.code for d in caught.value.diagnostics} == {"KP104"}
    messages = [d.message for d in caught.value.diagnostics]
    assert "`trtllm_gen` takes 1-64, 128 head rows; this layer has 192" in messages


def test_D29_workspace_counts_padded_head_rows(tmp_path: Path) -> None:
    """4 splits, 1 row, 96 heads as 128, 512 values and one LSE in FP32: 1050624 bytes."""
    plan = plan_of(make_project(tmp_path), "dsa_dcp")
    core = next(op for op in plan.ops if op.name == "prims_ts")
    (scratch,) = core.scratch
    step = next(s for s in plan.plans if dict(s.cores)["core"] == "prims_ts")
    names = {"rows": 1, "splits": 4, "core_heads": step.head_rows, "kv_lora": 512}
    assert evaluate(parse(scratch.bytes), names) == 1050624


@pytest.mark.parametrize(("page", "fits"), [(2048, True), (2112, True), (64, True), (2100, False)])
def test_D31_manager_pages_are_whole_kernel_pages(page: int, fits: bool, tmp_path: Path) -> None:
    found = cache_of(tmp_path, f"page: 64, manager_page: {page}")
    if fits:
        assert found == ()
        return
    message = "cache `latent_kv`: page 2100 is not a multiple of kernel page 64"
    assert one(found) == ("KP110", message)
    assert found[0].help == "choose a multiple of 64, for example 2112"


def needs(target: str) -> str:
    return f"needs {target}a (architecture-specific instructions); got {target}"


def unknown(target: str) -> str:
    return f"kpipe cannot emit `{target}`; known: sm_90a, sm_100a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sm_90", needs("sm_90")),
        ("9.0", needs("sm_90")),
        ('"9.0"', needs("sm_90")),
        ("10.0", needs("sm_100")),
        ("sm_103a", unknown("sm_103a")),
        ("sm_100f", unknown("sm_100f")),
        ("sm_107a", unknown("sm_107a")),
        ("sm_110a", unknown("sm_110a")),
        ("9.10", unknown("9.10")),
        ("SM_90A", unknown("SM_90A")),
    ],
)
def test_D40_targets_are_names_and_never_compared_as_numbers(
    text: str, message: str, tmp_path: Path
) -> None:
    found = findings_edited(tmp_path, "dsa_tp", (TARGETS, f"targets: [sm_100a, sm_90a, {text}]"))
    assert one(found) == ("KP104", message)
    assert found[0].allowed == ("sm_90a", "sm_100a")


def test_D40_version_and_name_are_the_same_target(tmp_path: Path) -> None:
    for number, text in enumerate(("9.0a, 10.0a", '"9.0a", "sm_100a"')):
        root = tmp_path / str(number)
        plan = plan_edited(root, "dsa_tp", (TARGETS, f"targets: [{text}]"))
        assert plan.targets == ("sm_90a", "sm_100a")


def test_D40_an_op_that_does_not_list_a_target_is_refused(tmp_path: Path) -> None:
    edit = ('{"1-64": sparse_decode}', '{"1-64": trtllm_gen}')
    (found,) = findings_edited(tmp_path, "dsa_tp", edit)
    assert (found.code, found.message) == ("KP104", "`trtllm_gen` does not run on sm_90a")
    assert found.allowed == ("sm_100a",)


def table(text: str, rows: str) -> tuple[dict[int, str], list[tuple[str, str]]]:
    """A table of a spec over declared rows: what each row gets, or the findings."""
    root = read_document("x.yaml", f"t: {text}\n")
    node = find(root, ("t",))
    entries = [(e.key, e.key_span) for e in node.entries]  # type: ignore[union-attr]
    ranges, found = check_table(entries, parse_rows(rows), "t", root.span)
    values = [e.value.raw for e in node.entries]  # type: ignore[union-attr]
    held = {row: lookup(ranges, row) for row in parse_rows(rows)} if ranges else {}
    return (
        {row: values[cell.entry] for row, cell in held.items() if cell},
        [(f.code, f.message) for f in found],
    )


@pytest.mark.parametrize(
    ("text", "rows", "code", "message"),
    [
        (
            '{"1-8": pdl, "9-32": stream, "64-128": off}',
            "1-256",
            "KP121",
            "t: rows 33-63, 129-256 not covered",
        ),
        ('{"1-8": pdl, "8-32": stream}', "1-32", "KP122", "t: row 8 in entries `1-8` and `8-32`"),
        (
            '{"9-": stream, "10-32": pdl}',
            "9-32",
            "KP120",
            "t: open range `9-` must be the last entry, but `10-32` comes after it",
        ),
        ('{"8-1": pdl}', "1-8", "KP120", "t: `8-1` runs backwards"),
        ('{"0-8": pdl}', "1-8", "KP120", "t: `0-8` names row 0: rows count from 1"),
        ('{"1-8,": pdl}', "1-8", "KP120", "t: `1-8,` ends with a comma"),
        (
            '{"1-8:pdl": x}',
            "1-8",
            "KP120",
            "t: `1-8:pdl` is a row range with a value in one text",
        ),
        ('{"1-8=pdl": x}', "1-8", "KP120", "t: `1-8=pdl` is a row range with a value in one text"),
        (
            '{"1-8:pdl;9-32:stream": x}',
            "1-32",
            "KP120",
            "t: `1-8:pdl;9-32:stream` holds several entries",
        ),
    ],
)
def test_D45_tables_have_no_gaps_overlaps_or_leftovers(
    text: str, rows: str, code: str, message: str
) -> None:
    held, found = table(text, rows)
    assert held == {}
    assert found == [(code, message)]


def test_D45_order_of_entries_does_not_matter() -> None:
    assert table('{"9-32": stream, "1-8": pdl}', "1-32") == table(
        '{"1-8": pdl, "9-32": stream}', "1-32"
    )


def test_D45_a_total_table_answers_every_declared_row() -> None:
    held, found = table('{"1-8": pdl, "9-32": stream, "33-": off}', "1, 8, 9, 32, 33, 1000000")
    assert found == []
    assert held == {1: "pdl", 8: "pdl", 9: "stream", 32: "stream", 33: "off", 1000000: "off"}


def test_D45_an_unknown_mode_lists_the_known_ones(tmp_path: Path) -> None:
    edit = ('{q1: {"1-4": front, "5-32"', '{q1: {"1-4": turbo, "5-32"')
    (found,) = findings_edited(tmp_path, "dsa_tp", edit)
    assert (found.code, found.message) == ("KP103", "unknown mode `turbo`")
    assert "fork_split" in found.allowed


def test_D45_an_empty_table_is_not_a_default(tmp_path: Path) -> None:
    edit = ("variants: {mla_query: {", "options: {}\n    variants: {mla_query: {}, other: {")
    found = findings_edited(tmp_path, "dsa_tp", edit)
    assert "KP121" in {f.code for f in found}


@pytest.mark.parametrize(
    ("old", "new", "key", "help"),
    [
        ("\nstages:\n", "\nstagess:\n", "`stagess`", "did you mean `stages`?"),
        ("name: dsa_tp\n", "nmae: dsa_tp\n", "`nmae`", "did you mean `name`?"),
        (
            "ops: [packed_gemm, gate_gemm]\n    tactics:",
            "ops: [packed_gemm, gate_gemm]\n    tactic:",
            "`tactic` in `stages.projection`",
            "did you mean `tactics`?",
        ),
        (
            "\noverlap:\n",
            "\noverlap_mode:\n",
            "`overlap_mode`",
            "it is now `overlap: {modes, table}`",
        ),
    ],
)
def test_D46_unknown_and_removed_keys(
    old: str, new: str, key: str, help: str, tmp_path: Path
) -> None:
    found = [f for f in findings_edited(tmp_path, "dsa_tp", (old, new)) if "unknown" in f.message]
    assert [(f.code, f.message, f.help) for f in found] == [("KP101", f"unknown key {key}", help)]
    assert found[0].span is not None


def test_D46_unknown_environment_variables() -> None:
    with pytest.raises(SpecError) as caught:
        check_environment(["HOME", "KPIPE_CACHE_DIRR"])
    assert one(caught.value.diagnostics) == (
        "KP802",
        "unknown environment variable `KPIPE_CACHE_DIRR`",
    )
    check_environment(["HOME", "KPIPE_CACHE_DIR"])


def root_error(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        read_document("x.yaml", text)
    code, message = one(caught.value.diagnostics)
    return f"{code} {message}"


def test_D47_the_root_is_one_mapping() -> None:
    assert root_error("- a\n- b\n") == "KP107 expected one mapping, got a list"
    assert root_error("hello\n") == "KP107 expected one mapping, got a string"
    assert root_error("") == "KP107 expected one mapping, got nothing"
    assert root_error("a: 1\n---\nb: 2\n") == "KP107 expected one mapping, got 2 documents"


def test_D47_duplicate_keys_name_both_lines() -> None:
    message = "KP106 duplicate key `rows`: written on lines 1 and 2"
    assert root_error("rows: 8\nrows: 16\n") == message


def test_D47_off_is_a_word_and_012_is_refused(tmp_path: Path) -> None:
    old = "  o_proj: {ops: [o_proj]}"
    plans = [
        plan_edited(tmp_path / str(i), "dsa_tp", (old, old[:-1] + f", pdl: {{o_proj: {word}}}}}"))
        for i, word in enumerate(("off", "'off'"))
    ]
    first, second = ([s.identity for s in plan.plans] for plan in plans)
    assert first == second
    assert root_error("heads: 012\n") == "KP107 `012`: an integer does not start with 0"
    (found,) = findings_edited(tmp_path, "dsa_tp", ("sigmoid: refined", "sigmoid: no"))
    assert one((found,)) == ("KP102", "`no` is not a value of `numerics.sigmoid`")


def test_D47_small_numbers_are_numbers(tmp_path: Path) -> None:
    geometry = "geometry/kimi_k31.yaml"
    root = make_project(tmp_path, [(geometry, "rms_eps: 1.0e-6", "rms_eps: 1e-5")])
    assert plan_of(root).scalars["rms_eps"] == 1e-5


TILES = (
    '"1-8": {tile_n: 32, tokens: 8}, "9-16": {tile_n: 32, tokens: 16}, '
    '"17-32": {tile_n: 32, tokens: 32}, "33-64": {tile_n: 32, tokens: 64}}}'
)


def test_D48_the_largest_declared_row_count_is_captured(tmp_path: Path) -> None:
    """The declared rows are the sizes that get a graph: nothing is generated by a stride, so the
    largest is always one of them, whatever its neighbours are."""
    edits = (
        ('batches: "1-8, 16, 32, 64", queries: [1, 4]', 'batches: "700, 8, 1-4", queries: [1]'),
        (', q4: {"4-8": front, "9-32": fork, "33-64": fork_split}', ""),
        (', q4: {"4-32": fork, "33-64": fork_split}', ""),
        ('sm_90a:  {q1: {"1-4": front, "5-32": fork, "33-64"', 'sm_90a: {q1: {"1-8": front, "9-"'),
        ('{"1-4": late_front, "5-32": fork, "33-64"', '{"1-8": front, "9-"'),
        *(
            (f"{tiles}{after}", f'"1-": {{tile_n: 32, tokens: 64}}}}}}{after}')
            for tiles, after in (
                (TILES.replace("tokens: 8}", "tokens: 8, ring: 104}"), "\n  query"),
                (TILES, "\n    options"),
            )
        ),
        ('"1-32": mla_query, "33-64"', '"1-32": mla_query, "33-"'),
        ('"1-2": index_front, "3-64"', '"1-2": index_front, "3-"'),
        ('{"1-64": sparse_decode}', "sparse_decode"),
        ('{"1-15": prims_ts, "16-64": trtllm_gen}', "trtllm_gen"),
        ('{"1-64": mla_value}', "mla_value"),
        ('"1-32": mla_value, "33-64"', '"1-32": mla_value, "33-"'),
    )
    found = findings_edited(tmp_path / "a", "dsa_tp", *edits)
    # Modes that only small row counts would use stay declared; every row is planned.
    assert found == ()
    plan = plan_of(tmp_path / "a")
    assert plan.rows == ((1, (1, 2, 3, 4, 8, 700)),)
    assert plan.rows_cap == 700
    assert {s.rows for s in plan.plans} == {1, 2, 3, 4, 8, 700}


def test_D48_a_row_count_listed_twice_is_an_error_and_not_a_fix_up(tmp_path: Path) -> None:
    edit = ('"1-8, 16, 32, 64"', '"8, 4, 4, 16"')
    found = findings_edited(tmp_path, "dsa_tp", edit)
    assert one(found) == ("KP122", "rows.batches: row 4 is listed twice: in `4` and `4`")


def test_D49_tp_and_dcp_that_do_not_fit(tmp_path: Path) -> None:
    edit = (DCP, DCP.replace("tp: 8, dcp: 8", "tp: 6, dcp: 4"))
    found = findings_edited(tmp_path, "dsa_dcp", edit)
    assert one(found) == ("KP110", "tp 6 is not a multiple of dcp 4")
    assert found[0].help == "set dcp equal to tp"


def test_D49_interleave_that_does_not_divide_the_page(tmp_path: Path) -> None:
    found = findings_edited(
        tmp_path, "dsa_dcp", (DCP, DCP.replace("interleave: 1", "interleave: 48"))
    )
    assert [(f.code, f.message) for f in found] == [
        ("KP110", f"interleave 48 does not divide page 64 of cache `{name}`")
        for name in ("index_kv", "latent_kv")
    ]


def test_D49_a_cache_layout_that_the_core_cannot_read(tmp_path: Path) -> None:
    edit = (LATENT, LATENT.replace("fp8_tensor", "nvfp4_ds_mla"))
    found = findings_edited(tmp_path, "dsa_tp", edit)
    messages = {f.message for f in found}
    assert "`sparse_decode` cannot use cache format nvfp4_ds_mla of `latent_kv`" in messages
    assert {f.code for f in found} == {"KP104"}


def test_D49_context_parallelism_needs_the_lse(tmp_path: Path) -> None:
    """Under dcp every core writes its LSE; without a buffer for it the spec is refused."""
    lse = "  partial_lse: {shape: [rows, tp * heads], dtype: fp32}\n"
    found = findings_edited(tmp_path, "dsa_dcp", (lse, ""))
    message = (
        "`sparse_decode` needs a buffer `partial_lse` (rows, tp * heads, fp32), which nothing "
        "declares"
    )
    assert ("KP103", message) in [(f.code, f.message) for f in found]


def test_D49_an_op_without_the_capability_is_refused_by_name(tmp_path: Path) -> None:
    """Queries of three rows: the scorer says 1, 2 or 4 itself, before anything is built."""
    edits = (
        ("queries: [1, 4]", "queries: [1, 3]"),
        ('q4: {"4-64": fork}}\n    sm_100a', 'q3: {"3-6": fork}}\n    sm_100a'),
        ('q4: {"4-64": fork}}\n', 'q3: {"3-6": fork}}\n'),
    )
    found = findings_edited(tmp_path, "dsa_dcp", edits[0], edits[1], edits[2])
    assert one(found) == ("KP104", "`index_scores` does not take q 3 (query rows per request)")
    assert found[0].allowed == ("1", "2", "4")


def test_D49_an_interleave_that_an_op_does_not_support(tmp_path: Path) -> None:
    """An op that says which interleaves it takes is refused elsewhere, at the place it is named."""
    root = make_project(
        tmp_path, [("dsa_dcp.yaml", DCP, DCP.replace("interleave: 1", "interleave: 64"))]
    )
    resolved = resolve_spec(str(root / "pipelines" / "dsa_dcp.yaml"), {})
    scores = resolved.contracts["index_scores"]
    strict = replace(scores, limits=replace(scores.limits, interleaves=(1,)))
    contracts = {**resolved.contracts, "index_scores": strict}
    with pytest.raises(SpecError) as caught:
        build_plan(replace(resolved, contracts=contracts), Report(resolved.source))
    assert one(caught.value.diagnostics) == (
        "KP104",
        "`index_scores` does not take interleave 64",
    )
    assert caught.value.diagnostics[0].allowed == ("1",)


def test_D49_every_finding_of_a_run_is_reported(tmp_path: Path) -> None:
    edits = (
        (DCP, DCP.replace("interleave: 1", "interleave: 48")),
        (LATENT, "latent_kv: {format: fp8_tensor, page: 64, manager_page: 2100}"),
    )
    found = findings_edited(tmp_path, "dsa_dcp", *edits)
    assert [f.code for f in found] == ["KP110"] * 3
    assert list(found) == sorted(found)
