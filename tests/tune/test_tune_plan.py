"""`kpipe tune plan`: which candidates, for which rows, and the code that would run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tune_recorded import planned, project

from kpipe.codegen.cli import main
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.tune.model import Options, TuneStep, Tuning
from kpipe.codegen.tune.plan import plan_tuning, stands_for
from kpipe.codegen.tune.tiles import tile_candidates
from kpipe.runtime.generated_folder import layer_in, load_layer
from kpipe.runtime.layer import Layer
from kpipe.runtime.recording import recorded

SERIAL = ["packed_gemm", "mla_query", "index_gemm", "dsa_index", "index_scores", "topk_select"]
SERIAL += ["sparse_decode", "mla_value", "o_proj"]  # as base.yaml lists it


@pytest.fixture(scope="module")
def tuning(tmp_path_factory: pytest.TempPathFactory) -> Tuning:
    return planned(project(tmp_path_factory.mktemp("project")))


@pytest.fixture(scope="module")
def layer(tuning: Tuning, tmp_path_factory: pytest.TempPathFactory) -> type[Layer]:
    folder = tmp_path_factory.mktemp("plan")
    for name, text in tuning.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return load_layer(folder)


def step_of(tuning: Tuning, key: str) -> TuneStep:
    return next(step for step in tuning.steps if step.key == key)


def names(step: TuneStep) -> list[str]:
    return [one.name for one in step.candidates]


def test_two_plans_of_one_spec_are_equal(tmp_path: Path) -> None:
    here, there = (
        planned(project(tmp_path / name), rows=(2,), queries=(1,)) for name in ("here", "there")
    )
    assert json.dumps(here.as_json()["steps"]) == json.dumps(there.as_json()["steps"]) != "[]"
    assert here.made_from == there.made_from
    assert here.files.keys() == there.files.keys()


def test_present_choice_comes_first_then_other_modes(tuning: Tuning) -> None:
    step = step_of(tuning, "mode q1 rows 2")
    assert (step.present, step.stands_for) == ("serial", (1, 2))
    assert "fork" in names(step) and any(name.startswith("fork_query") for name in names(step)[1:])
    assert step_of(tuning, "mode q1 rows 8").present == "fork"


def test_found_modes_have_names_of_their_own_and_say_where_they_are_from(tuning: Tuning) -> None:
    found = [mode for mode in tuning.modes if not mode.declared]
    assert len({mode.streams for mode in found}) == len(found) > 0
    assert all("mla_query on" in mode.origin or "index" in mode.origin for mode in found)


def test_rows_stand_for_those_below_with_the_same_choice() -> None:
    choice = {1: "a", 2: "a", 3: "a", 4: "a", 5: "b", 8: "b", 16: "b"}
    declared = tuple(choice)
    assert stands_for(4, (1, 4, 16), declared, choice.__getitem__) == (2, 3, 4)
    assert stands_for(16, (1, 4, 16), declared, choice.__getitem__) == (5, 8, 16)
    assert stands_for(16, (2, 16), declared, choice.__getitem__) == (5, 8, 16)  # 3, 4 choose "a"


def test_generated_methods_launch_what_the_mode_lists(tuning: Tuning, layer: type[Layer]) -> None:
    for step in tuning.steps:
        for one in step.candidates if step.kind == "mode" else ():
            found = layer_in(layer, one.module)
            table = found.TABLE[("sm_90a", step.q)]
            assert table[step.rows] == one.method
            launched = [call.op for call in recorded(found(), one.method)]
            wanted = sorted(SERIAL if one.name == "serial" else [*SERIAL, "query_norm"])
            assert sorted(launched) == wanted
            if one.name == "serial":
                assert launched == SERIAL


def test_tiles_hold_the_rows_and_begin_with_the_present_one(tuning: Tuning) -> None:
    step = step_of(tuning, "packed_gemm q1 rows 8")
    assert (
        names(step)[0] == "tile_n 32, tokens 8, ring 104"
    )  # as the contract says for up to 8 rows
    assert step.stands_for == (3, 4, 8) and step.method == "_fork"
    assert all(dict(one.tactic)["tokens"] == 8 for one in step.candidates)  # 16 and more idle
    own = step_of(tuning, "mla_query q1 rows 2")
    assert own.candidates[0].tactic == () and names(own)[1:] == ["tokens 16", "tokens 16, parts 4"]


def test_limit_keeps_the_present_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    found = planned(project(tmp_path), modes=2, tiles=2, queries=(1,))
    for step in found.steps:
        assert len(step.candidates) == 2
    modes = {one.name: one.reason for one in step_of(found, "mode q1 rows 2").left_out}
    assert any("beyond the limit" in reason for reason in modes.values())
    tiles = [one.name for one in step_of(found, "sparse_decode q1 rows 2").left_out]
    assert "splits 1" in tiles and len(tiles) == 6


def test_one_candidate_is_no_question(tmp_path: Path) -> None:
    found = planned(project(tmp_path), modes=1)
    assert {step.kind for step in found.steps} == {"tile"}
    assert not any(mode.declared is False for mode in found.modes)


def test_illegal_mode_is_left_out_with_its_reason(tmp_path: Path) -> None:
    spec = project(
        tmp_path,
        ("    serial:\n", "    serial:\n      requires: {dcp: true}\n"),
        ('{"1-4": serial, "5-8": fork}', '{"1-8": fork}'),
    )
    found = planned(spec, rows=(2,), queries=(1,), tiles=1)
    left = {one.name: one.reason for one in step_of(found, "mode q1 rows 2").left_out}
    assert left["serial"] == "it needs dcp"


def test_undeclared_selection_is_refused(tmp_path: Path) -> None:
    spec = project(tmp_path)
    for asked in (
        {"rows": (9,)},
        {"queries": (2,)},
        {"arch": "sm_80"},
        {"rows": (1,), "queries": (4,)},
    ):
        with pytest.raises(SpecError) as caught:
            plan_tuning(str(spec), {}, Options(**asked), lambda name: None)
        assert caught.value.diagnostics[0].code == "KP808"


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["tune", *words])
    return result.exit_code, result.stdout, result.stderr


def test_command_writes_a_folder_and_says_what_comes_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = run("plan", "base.yaml", "--out", "p", "--rows", "2", "--q", "1")
    assert code == 0 and "mode q1 rows 2" in out and "left out" in out
    assert (
        err == "on the machine with the GPU: python3 -m kpipe.runtime.tune p --out results.json\n"
    )
    assert json.loads((tmp_path / "p" / "plan.json").read_text())["pipeline"] == "layer"
    assert run("plan", "base.yaml", "--out", "p", "--rows", "2", "--q", "1")[0] == 0  # again


def test_command_refuses_a_folder_of_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, _, err = run("plan", "base.yaml", "--out", "geometry", "--rows", "2")
    assert code == 2 and "holds other files than a plan" in err
    code, _, err = run("plan", "base.yaml", "--out", "p", "--rows", "two")
    assert code == 2 and "--rows two: write row counts like 1,4,16" in err
    code, _, err = run("plan", "none.yaml", "--out", "p")
    assert code == 2 and "no such file" in err


def test_a_switch_is_one_step_away() -> None:
    """0 has no doublings: a tile that turns it is as near as any other changed field."""
    contract = CONTRACTS["mla_value"]
    found, _ = tile_candidates(contract, (("early", 1),), 8, 5)
    assert [one.name for one in found] == ["early 1", "early 0"]
