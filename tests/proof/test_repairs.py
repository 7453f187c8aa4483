"""Repairs are what they say: each offered edit is applied to a copy and checked from scratch."""

from __future__ import annotations

from pathlib import Path

import pytest
from spec_project import edit, findings_of, make_project, plan_of, source_of

from kpipe.codegen.commands.check import check_one
from kpipe.codegen.diagnostics import Diagnostic, Edit, Repair, Span, render_text
from kpipe.codegen.edits import edited
from kpipe.codegen.plan.cost import layer_time
from kpipe.codegen.repair import rank
from kpipe.codegen.repair.moves import Words, moved_ahead, moved_behind
from kpipe.codegen.repair.trial import tried
from kpipe.codegen.spec.load import load_source

DCP = "dsa_dcp.yaml"
SWAPPED = (
    "topk_local, topk_merge, join side,\n             core, dcp_value,",
    "topk_local, core, join side,\n             topk_merge, dcp_value,",
)
LAST = (
    "             core, dcp_value, o_proj, o_reduce]\n      side: [mla_query, query_wait]\n    fr",
    "             core, dcp_value, o_proj, packed_gemm, o_reduce]\n"
    "      side: [mla_query, query_wait]\n    fr",
)
SIDEWAYS = (
    ("query_norm, index_gemm, dsa_index, index_scores, topk_local, topk_merge, join side,\n",
     "query_norm, index_gemm, index_scores, topk_local, topk_merge, join side,\n"),
    ("             core, dcp_value, o_proj, o_reduce]\n      side: [mla_query, query_wait]\n    fr",
     "             core, dcp_value, o_proj, o_reduce]\n"
     "      side: [dsa_index, mla_query, query_wait]\n    fr"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KPIPE_CACHE_DIR", str(tmp_path / "cache"))


def broken(root: Path, *edits: tuple[str, str]) -> tuple[str, dict[str, str], list[Diagnostic]]:
    """A spec after edits, its texts and its findings with repairs."""
    make_project(root, [(DCP, old, new) for old, new in edits])
    path, texts = str(root / "pipelines" / DCP), {}
    return path, texts, list(check_one(path, texts).found)


def key(finding: Diagnostic) -> tuple[str, str]:
    return finding.code, finding.message


@pytest.mark.parametrize("edits", [(SWAPPED,), SIDEWAYS], ids=["swapped", "sideways"])
def test_every_repair_clears_its_finding_brings_no_other_and_costs_what_it_says(
    edits: tuple[tuple[str, str], ...], tmp_path: Path
) -> None:
    path, texts, found = broken(tmp_path, *edits)
    before = {key(finding) for finding in found}
    seen: dict[tuple[Edit, ...], tuple[set, float | None]] = {}
    for finding in found:
        assert finding.repairs and finding.help == finding.repairs[0].text
        assert finding.fix == finding.repairs[0].edits
        for repair in finding.repairs:
            if repair.edits not in seen:
                Path(path).write_text(edited(texts[path], repair.edits))
                after = {key(other) for other in findings_of(path)}
                seen[repair.edits] = after, None if after else mean_time(tmp_path, repair)
            after, _ = seen[repair.edits]
            assert key(finding) not in after and after <= before
    timed = {r.edits: r.cost for f in found for r in f.repairs if r.cost is not None}
    first = found[0].repairs[0].edits
    assert seen[first][0] == set() and timed[first] == 0
    for edits_of, cost in timed.items():
        assert cost == pytest.approx(seen[edits_of][1] - seen[first][1], abs=2e-3)
    in_mode = [r.cost for r in found[0].repairs if "select mode" not in r.text and r.cost]
    assert in_mode == sorted(in_mode)
    Path(path).write_text(texts[path])


def mean_time(root: Path, repair: Repair) -> float:
    """Mean layer time of the steps that the basis names: rows 5 and up at q 1, all at q 4."""
    assert "mean of sm_90a q 1 rows 5-8, 16, 32, 64; q 4 rows 4, 8, 16, 32, 64" in repair.basis
    plan = plan_of(root, "dsa_dcp")
    steps = [s for s in plan.plans if s.arch == "sm_90a" and (s.q == 4 or s.rows >= 5)]
    return sum(layer_time(plan, step) for step in steps) / len(steps)


def test_what_clears_every_finding_of_the_mode_comes_first(tmp_path: Path) -> None:
    """A join ahead of the core would order the query alone; the swap orders the select too."""
    _, _, found = broken(tmp_path, SWAPPED)
    texts = {finding.repairs[0].text for finding in found}
    assert len(found) > 3 and texts == {"swap `core` and `topk_merge`"}


def test_a_writer_moves_ahead_of_all_its_readers_and_of_the_forks_of_their_streams(
    tmp_path: Path,
) -> None:
    """Eight findings, one cause; no move between two ops alone would clear them all."""
    old = "[packed_gemm, fork side, query_norm, index_gemm, dsa_index, index_scores, topk_local, "
    _, _, found = broken(tmp_path, (old, old.replace("packed_gemm, ", "", 1)), LAST)
    assert len(found) > 3 and {finding.code for finding in found} == {"KP201"}
    texts = {finding.repairs[0].text for finding in found}
    assert texts == {"move `packed_gemm` ahead of `fork side`"}


def test_another_mode_comes_behind_repairs_of_this_one_even_where_it_is_faster(
    tmp_path: Path,
) -> None:
    _, _, found = broken(tmp_path, SWAPPED)
    repairs = found[0].repairs
    other = next(r for r in repairs if r.text == "select mode `front` where the table says `fork`")
    assert other.cost < 0 == repairs[0].cost


def test_a_trial_touches_no_file_and_sees_what_would_be_found(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    path, texts = str(root / "pipelines" / DCP), {}
    source = load_source(path, texts)
    words = Words(source.root)
    join = words.named("fork", "main", "join side")
    last = words.lists["fork", "main"][-1]
    late = tried(path, texts, moved_behind(texts, join, last, words), ("fork",))
    assert {finding.code for finding in late.found} == {"KP201"} and late.pipeline is None
    fine = tried(path, texts, moved_ahead(texts, join, words.named("fork", "main", "core")), None)
    assert fine.found == () and {step.mode for step in fine.steps} == {"fork", "wait"}
    assert Path(path).read_text() == source_of(DCP).read_text()


def test_a_mode_that_no_step_selects_is_tried_for_every_step(tmp_path: Path) -> None:
    root = make_project(tmp_path)
    path, texts = str(root / "pipelines" / DCP), {}
    words = Words(load_source(path, texts).root)
    core = words.named("front", "main", "core")
    ahead = moved_ahead(texts, core, words.named("front", "main", "index_scores"))
    assert "KP201" in {finding.code for finding in tried(path, texts, ahead, ("front",)).found}
    assert {step.mode for step in tried(path, texts, (), ("front",)).steps} == {"front"}


def test_the_number_of_trials_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []

    def counting(*given: object) -> object:
        counted.append(given[2])
        return tried(*given)

    monkeypatch.setattr(rank, "tried", counting)
    make_project(tmp_path, [(DCP, *SWAPPED)])
    edit(tmp_path, DCP, "topk_local, topk_merge, query_wait, core", "core, topk_local, topk_merge")
    path = str(tmp_path / "pipelines" / DCP)
    check_one(path, {})
    assert rank.TRIALS < len(counted) <= rank.ALL_TRIALS
    assert len(set(counted)) == len(counted)


def test_what_only_the_engines_author_knows_is_a_claim(tmp_path: Path) -> None:
    _, _, found = broken(tmp_path, ("between_layers: waits", "between_layers: silent"))
    for finding in found:
        assert [repair.claim for repair in finding.repairs] == [True, True]
        assert finding.fix == () and "`environment: {between_layers: waits}`" in finding.help


def test_repairs_and_what_a_finding_rests_on_as_text() -> None:
    span = Span("x.yaml", 1, 1, 1, 2)
    repairs = tuple(
        Repair(f"do {n}", (), cost, basis="us a layer" if cost is not None else "")
        for n, cost in enumerate((-0.01, 1.94, None, 3.0))
    )
    finding = Diagnostic(
        "KP301", "m", span, help="do 0", rests=("rule `stream`: s", "row 1: r"), repairs=repairs
    )
    assert render_text([finding], {}) == (
        "x.yaml:1:1: error[KP301]: m\n"
        "   = repair 1 (+0.0 us): do 0\n"
        "   = repair 2 (+1.9 us): do 1\n"
        "   = repair 3: do 2\n"
        "   = cost: us a layer\n"
        "   = rests on: rule `stream`: s\n"
        "   = rests on: row 1: r\n"
        "   = explain: kpipe explain KP301\n"
    )
