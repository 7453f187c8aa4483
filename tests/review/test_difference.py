"""Each class of change of a schedule, by an edit of a shipped spec."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from review_project import FORK_MAIN, LATE, TABLE, edited, sides

from kpipe.codegen.review.difference import difference
from kpipe.codegen.review.model import Difference, LaunchChange, Rename, Setting
from kpipe.codegen.review.side import look


def only_list(found: Difference):
    """The one pair of launch lists that differs."""
    assert len(found.lists) == 1
    return found.lists[0]


def launches(found: Difference, kind: str) -> set[tuple[str, str, str]]:
    return {
        (one.name, one.before, one.after)
        for change in found.lists
        for one in change.launches
        if one.kind == kind
    }


def test_equal_sides_have_no_difference(tmp_path: Path) -> None:
    found = edited(tmp_path, "dsa_tp")
    assert found.state == "same"
    assert found.lists == () and found.settings == () and found.renames == ()
    assert {entry.state for entry in found.ranges} == {"same"}
    assert {delta for entry in found.ranges for delta in entry.deltas} == {0.0}


def test_a_comment_or_another_order_of_keys_is_no_difference(tmp_path: Path) -> None:
    rows = '"1-4": front, "5-32": fork, "33-64": fork_split}, q4: {"4-8": front'
    other = '"33-64": fork_split, "5-32": fork, "1-4": front}, q4: {"4-8": front'
    found = edited(tmp_path, "dsa_tp", (rows, other), ("kpipe: 1\n", "kpipe: 1\n# a remark\n"))
    assert found.state == "same"


def test_one_entry_of_the_table(tmp_path: Path) -> None:
    found = edited(tmp_path, "dsa_tp", (TABLE, LATE))
    changed = found.changed_ranges
    assert [(one.arch, one.q, one.rows) for one in changed] == [("sm_90a", 1, (1, 2, 3, 4))]
    assert (changed[0].mode_before, changed[0].mode_after) == ("front", "late_front")
    change = only_list(found)
    assert change.launches == (
        LaunchChange("moved", "mla_query", "side, first", "main, behind topk_select"),
    )
    assert change.streams == (2, 1)
    assert change.nodes == (8, 8)
    # front: 7 launches along main, fork, join, the side stream from layer to layer, and the end.
    assert change.edge_counts == (11, 9)
    assert change.parted == (("mla_query", ("index_front", "index_scores", "topk_select")),)
    assert change.met == ()
    assert change.numerics == ()


def test_the_other_way_round_is_the_mirror_image(tmp_path: Path) -> None:
    before, after = sides(tmp_path, "dsa_tp", (TABLE, LATE))
    there, back = difference(before, after), difference(after, before)
    (one,), (other,) = there.lists, back.lists
    assert other.parted == one.met and other.met == one.parted
    assert other.timeline_before == one.timeline_after
    assert {(e.after, e.before) for e in other.edges} == {(e.before, e.after) for e in one.edges}
    assert [-d for d in there.changed_ranges[0].deltas] == pytest.approx(
        back.changed_ranges[0].deltas
    )


def test_edges_say_which_orders_are_left(tmp_path: Path) -> None:
    (change,) = edited(tmp_path, "dsa_tp", (TABLE, LATE)).lists
    removed = {(e.before.first, e.before.second): e.implied for e in change.edges if not e.after}
    assert removed[("packed_gemm", "mla_query")]  # still ordered, along main
    added = [e for e in change.edges if not e.before]
    assert [(e.after.first, e.after.second, e.implied) for e in added] == [
        ("topk_select", "mla_query", False)
    ]


def test_a_stream_changes_hands(tmp_path: Path) -> None:
    turned = (
        "fork:\n      main: [packed_gemm, fork side, mla_query, join side, core, value, o_proj]\n"
        "      side: [query_norm, index_gemm, dsa_index, index_scores, topk_select]"
    )
    found = edited(tmp_path, "dsa_tp", (FORK_MAIN, turned))
    rows = {(one.arch, one.q): one.rows for one in found.changed_ranges if one.arch == "sm_90a"}
    assert rows == {("sm_90a", 1): (5, 6, 7, 8, 16, 32), ("sm_90a", 4): (16, 32)}
    moved = launches(found, "moved")
    assert ("mla_query", "side, first", "main, behind packed_gemm") in moved
    assert ("query_norm", "main, behind packed_gemm", "side, first") in moved
    assert len(found.lists) == 3  # one per core
    assert all(change.parted == change.met == () for change in found.lists)


def test_order_within_one_stream_names_what_moved_and_nothing_else(tmp_path: Path) -> None:
    old = "index_front, index_scores, topk_select, mla_query, core"
    new = "mla_query, index_front, index_scores, topk_select, core"
    found = edited(tmp_path, "dsa_tp", (old, new))
    assert launches(found, "moved") == {
        ("mla_query", "main, behind topk_select", "main, behind packed_gemm")
    }


def test_an_op_replaces_others_and_numerics_change(tmp_path: Path) -> None:
    index = 'index: {"1-2": index_front, "3-64": [index_gemm, dsa_index]}'
    front = 'index: {"1-64": index_front}'
    waits = (
        '"1-4": front, "5-32": fork, "33-64": fork_split}, q4',
        '"1-32": wait, "33-64": fork_split}, q4',
    )
    make = sides(tmp_path / "first", "dsa_tp", waits)[1]
    again = sides(tmp_path / "second", "dsa_tp", waits, (index, front))[1]
    found = difference(make, again)
    replaced = launches(found, "replaced")
    assert {(name, old) for name, old, _ in replaced} == {("index_front", "index_gemm + dsa_index")}
    said = {line for change in found.lists for line in change.numerics}
    assert "index_front replaces index_gemm + dsa_index" in said
    assert [one.rows for one in found.changed_ranges] == [(3, 4, 5, 6, 7, 8, 16, 32)]


def test_a_core_on_one_arch(tmp_path: Path) -> None:
    found = edited(
        tmp_path,
        "dsa_tp",
        ('{"1-15": prims_ts, "16-64": trtllm_gen}', '{"1-7": prims_ts, "8-64": trtllm_gen}'),
    )
    assert {(one.arch, one.q, one.rows) for one in found.changed_ranges} == {
        ("sm_100a", 1, (8,)),
        ("sm_100a", 4, (8,)),
    }
    assert {(name, old) for name, old, _ in launches(found, "replaced")} == {
        ("trtllm_gen", "prims_ts")
    }


def test_a_tile(tmp_path: Path) -> None:
    old = '{packed_gemm: {"1-8": {tile_n: 32, tokens: 8, ring: 104}'
    found = edited(tmp_path, "dsa_tp", (old, old.replace("tile_n: 32", "tile_n: 64")))
    assert launches(found, "tile") == {("packed_gemm", "tile_n=32", "tile_n=64")}
    assert all(change.edges == () for change in found.lists)
    said = {line for change in found.lists for line in change.numerics}
    assert said == {"packed_gemm: another tile, sums may be taken in another order"}


def test_an_option_with_its_flag(tmp_path: Path) -> None:
    found = edited(
        tmp_path,
        "dsa_dcp",
        ('reduce: {"1-32": one_shot, "33-64": two_shot}', "reduce: one_shot"),
    )
    assert ("o_proj", "reduce=two_shot", "reduce=one_shot") in launches(found, "options")
    assert ("o_proj", "two_shot=on", "two_shot=off") in launches(found, "flags")
    said = {line for change in found.lists for line in change.numerics}
    assert "o_proj: reduce two_shot -> one_shot" in said


def test_pdl_dropped_by_the_spec_and_gained_back(tmp_path: Path) -> None:
    weaker = ("value:\n    ops: [value]", "value:\n    ops: [value]\n    pdl: {mla_value: off}")
    before, after = sides(tmp_path, "dsa_tp", weaker)
    there, back = difference(before, after), difference(after, before)
    dropped = {
        (one.name, one.before, one.after, one.effect)
        for change in there.lists
        for one in change.launches
        if one.kind == "start"
    }
    assert dropped == {("mla_value", "pdl", "plain: the spec says so", "dropped")}
    gained = {
        (one.name, one.effect)
        for change in back.lists
        for one in change.launches
        if one.kind == "start"
    }
    assert gained == {("mla_value", "gained")}
    ports = {
        (e.before.port, e.after.port)
        for change in there.lists
        for e in change.edges
        if e.before and e.after
    }
    assert ports == {("programmatic", "full")}
    assert all(delta > 0 for one in there.changed_ranges for delta in one.deltas)


def test_a_hold_with_its_reason(tmp_path: Path) -> None:
    held = ("o_proj: {ops: [o_proj]}", "o_proj: {ops: [o_proj], pdl: {o_proj: hold}}")
    found = edited(tmp_path, "dsa_tp", held)
    assert {
        (one.name, one.before, one.after, one.effect)
        for change in found.lists
        for one in change.launches
    } == {("o_proj", "after_loads", "held: the spec says so", "dropped")}


def test_declarations(tmp_path: Path) -> None:
    found = edited(
        tmp_path,
        "dsa_tp",
        ("sigmoid: refined", "sigmoid: fast"),
        ("value: bf16}", "value: fp32}"),
        ("between_layers: waits", "between_layers: full"),
        ('batches: "1-8, 16, 32, 64"', 'batches: "1-8, 16, 32, 48, 64"'),
    )
    assert Setting("environment", "between_layers", "waits", "full") in found.settings
    assert Setting("rows", "q 1", "1-8, 16, 32, 64", "1-8, 16, 32, 48, 64") in found.settings
    assert found.numerics == ("rounding point value: bf16 -> fp32", "sigmoid: refined -> fast")
    new = [one for one in found.ranges if one.state == "new"]
    assert {one.rows for one in new} == {(48,)}
    assert {(one.mode_before, one.mode_after) for one in new} == {("", "fork_split")}


def test_a_mode_that_no_row_selects_is_a_declaration_only(tmp_path: Path) -> None:
    spare = "    late_front:\n"
    added = (
        "    spare:\n      main: [packed_gemm, mla_query, index, index_scores, topk_select, core, "
    )
    found = edited(tmp_path, "dsa_tp", (spare, f"{added}value, o_proj]\n{spare}"))
    assert found.changed_ranges == ()
    assert [(one.section, one.name, one.before) for one in found.settings] == [
        ("mode", "spare", "")
    ]


def test_memory_follows_the_buffers(tmp_path: Path) -> None:
    padded = ("    dtype: bf16\n    columns:", "    dtype: bf16\n    pad_to: 4096\n    columns:")
    found = edited(tmp_path, "dsa_tp", padded)
    assert found.memory is not None
    before, after = found.memory
    assert after.buffers - before.buffers == 64 * (4096 - 3808) * 2  # rows, columns, BF16
    assert (after.mailboxes, after.workspaces) == (before.mailboxes, before.workspaces)
    (buffer,) = (one for one in found.settings if one.section == "buffer")
    assert "[rows, 3808]" in buffer.before and "[rows, 4096]" in buffer.after


def test_a_renamed_buffer(tmp_path: Path) -> None:
    found = edited(
        tmp_path,
        "dsa_tp",
        ("q_c:      {", "qc:       {"),
        (
            "    ops: [query_norm, mla_query]\n",
            "    ops: [query_norm, mla_query]\n    with: {q_c: qc}\n",
        ),
        (
            "    ops: [index_front, index_gemm, dsa_index, index, index_scores, topk_select]\n",
            "    ops: [index_front, index_gemm, dsa_index, index, index_scores, topk_select]\n"
            "    with: {q_c: qc}\n",
        ),
    )
    assert found.renames == (Rename("buffer", "q_c", "qc"),)
    assert found.changed_ranges == () and found.settings == ()


def test_a_renamed_mode_and_a_renamed_stream(tmp_path: Path) -> None:
    before, after = sides(tmp_path, "dsa_tp")
    path = tmp_path / "pipelines" / "dsa_tp.yaml"
    text = path.read_text().replace("fork side", "fork aside").replace("join side", "join aside")
    text = text.replace("      side: [", "      aside: [").replace("late_front", "late_fused")
    path.write_text(text)
    found = difference(before, look(str(path), {}, lambda name: before.path))
    assert set(found.renames) == {
        Rename("stream", "side", "aside"),
        Rename("mode", "late_front", "late_fused"),
    }
    assert found.changed_ranges == () and found.settings == ()


def test_a_renamed_pipeline_and_a_renamed_stage(tmp_path: Path) -> None:
    found = edited(
        tmp_path,
        "dsa_tp",
        ("name: dsa_tp\n", "name: dsa_plain\n"),
        ("  sparse_core:\n", "  core_stage:\n"),
    )
    assert set(found.renames) == {
        Rename("pipeline", "dsa_tp", "dsa_plain"),
        Rename("stage", "sparse_core", "core_stage"),
    }
    assert found.changed_ranges == () and found.settings == ()


def test_a_renamed_instance(tmp_path: Path) -> None:
    before, _ = sides(tmp_path, "dsa_tp")
    path = tmp_path / "pipelines" / "dsa_tp.yaml"
    text = path.read_text()
    made = []
    for tag in ("left", "right"):
        path.write_text(re.sub(r"o_proj(?=\])", f"o_proj@{tag}", text))
        made.append(look(str(path), {}, lambda name: before.path))
    assert [side.found for side in made] == [(), ()]
    found = difference(*made)
    assert found.renames == (Rename("op instance", "o_proj_left", "o_proj_right"),)
    assert found.changed_ranges == () and found.settings == ()


def test_a_rename_and_a_change_are_both_reported(tmp_path: Path) -> None:
    before, _ = sides(tmp_path, "dsa_tp")
    path = tmp_path / "pipelines" / "dsa_tp.yaml"
    text = path.read_text().replace(TABLE, LATE).replace("late_front", "late_fused")
    path.write_text(text)
    found = difference(before, look(str(path), {}, lambda name: before.path))
    assert found.renames == (Rename("mode", "late_front", "late_fused"),)
    assert [(one.mode_before, one.mode_after) for one in found.changed_ranges] == [
        ("front", "late_fused")
    ]
