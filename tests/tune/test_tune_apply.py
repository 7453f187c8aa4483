"""`kpipe tune apply` on recorded results: which tables change, and everything that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from tune_recorded import STEADY, change, document, project, record

from kpipe.codegen.cli import main
from kpipe.codegen.plan.api import plan_pipeline

TABLE = '  table: {"1-4": serial, "5-8": fork}\n'
KEYED = """\
  table:
    # what serves small batches
    sm_90a:
      q1:
        "1-4": serial   # measured by hand
        "5-8": fork     # this one too
      q4: {"4": serial, "5-8": fork}
    sm_100a: {"1-4": serial, "5-8": fork}
"""
FASTER = STEADY * 0.9


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return project(tmp_path, (TABLE, KEYED))


def apply(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["tune", "apply", "base.yaml", "results.json", *words])
    return result.exit_code, result.stdout, result.stderr


def table(spec: Path) -> dict[tuple[str, int, int], str]:
    return {(s.arch, s.q, s.rows): s.mode for s in plan_pipeline(str(spec)).plans}


def test_only_the_cells_of_the_winner_change(spec: Path) -> None:
    before, text = table(spec), spec.read_text()
    record(Path("results.json"), document(spec), {"mode q1 rows 2": ("fork", FASTER)})
    code, out, err = apply()
    assert code == 0 and "-> fork for 1, 2" in out
    assert err.startswith("base.yaml: changed overlap.table\n")
    after = table(spec)
    assert {key for key in after if after[key] != before[key]} == {
        ("sm_90a", 1, 1),
        ("sm_90a", 1, 2),
    }
    new, old = spec.read_text().splitlines(), text.splitlines()
    assert [line for line in new if line not in old] == [
        "  # tuned: sm_90a by whole layers; NVIDIA X1, 2026-11-30, results.json",
        '        "1-2": fork',
        '        "3-4": serial   # measured by hand',
    ]
    assert [line for line in old if line not in new] == [
        '        "1-4": serial   # measured by hand'
    ]


def test_second_time_changes_nothing(spec: Path) -> None:
    wins = {
        "mode q1 rows 2": ("fork", FASTER),
        "mode q4 rows 8": ("fork_query", FASTER),
        "o_proj q1 rows 8": ("tile_n 56, tokens 8", FASTER),
        "mla_query q1 rows 2": ("tokens 16", FASTER),
    }
    record(Path("results.json"), document(spec), wins)
    assert apply()[0] == 0
    text = spec.read_text()
    code, _, err = apply()
    assert (code, err, spec.read_text()) == (0, "base.yaml: nothing to change\n", text)


def test_next_run_replaces_where_the_numbers_come_from(spec: Path) -> None:
    record(Path("results.json"), document(spec), {"mode q1 rows 2": ("fork", FASTER)})
    apply()
    again = document(spec, rows=(2,), queries=(1,))
    record(Path("results.json"), again, {"mode q1 rows 2": ("serial", FASTER)})
    assert apply()[0] == 0
    assert spec.read_text().count("# tuned: ") == 1
    assert table(spec)["sm_90a", 1, 2] == "serial"


@pytest.mark.parametrize(
    ("us", "scatter", "changes"),
    [
        (STEADY * 0.995, 0.0, False),  # steady, and not worth it
        (STEADY * 0.97, 0.001, True),
        (STEADY * 0.97, 0.02, False),  # four rounds that differ by six percent
    ],
)
def test_gain_has_to_exceed_the_spread(
    us: float, scatter: float, changes: bool, spec: Path
) -> None:
    text = spec.read_text()
    results = {"mode q1 rows 2": ("fork", us)}
    record(Path("results.json"), document(spec), results, scatter=scatter)
    assert apply()[0] == 0
    assert (spec.read_text() != text) is changes


def test_too_few_rounds_say_nothing(spec: Path) -> None:
    results = record(Path("results.json"), document(spec), {"mode q1 rows 2": ("fork", FASTER)})
    kept = [line for line in results.read_text().splitlines() if '"round": 2' not in line]
    kept = [line for line in kept if '"round": 3' not in line]
    results.write_text("\n".join(kept) + "\n")
    text = spec.read_text()
    code, out, _ = apply()
    assert code == 0 and "2 of at least 3 rounds" in out and spec.read_text() == text


def test_failed_candidate_never_wins_and_is_named(spec: Path) -> None:
    failed = {"mode q1 rows 2": "fork"}
    plan = document(spec)
    record(Path("results.json"), plan, {"mode q1 rows 2": ("fork", FASTER)}, failed=failed)
    text = spec.read_text()
    code, out, _ = apply()
    assert code == 0 and "mode q1 rows 2: fork failed: ValueError: no room" in out
    assert spec.read_text() == text
    record(Path("results.json"), plan, {}, failed={"mode q1 rows 2": "serial"})
    assert "the present choice failed: ValueError: no room" in apply()[1]


def test_found_mode_is_added_with_the_table(spec: Path) -> None:
    plan = document(spec)
    record(Path("results.json"), plan, {"mode q4 rows 8": ("fork_query", FASTER)})
    assert apply()[0] == 0
    found = {(s.arch, s.q, s.rows): s for s in plan_pipeline(str(spec)).plans}
    assert found["sm_90a", 4, 8].mode == "fork_query" and found["sm_90a", 4, 4].mode == "serial"
    lists: dict[str, list[str]] = {}
    for launch in found["sm_90a", 4, 8].launches:
        lists.setdefault(launch.stream, []).append(launch.word)
    streams = plan["modes"]["fork_query"]["streams"]
    ops = {name: [w for w in words if " " not in w] for name, words in streams.items()}
    assert lists == ops


def test_tiles_are_written_for_their_rows_and_architecture_alone(spec: Path) -> None:
    record(
        Path("results.json"),
        document(spec),
        {
            "o_proj q1 rows 8": ("tile_n 56, tokens 8", FASTER),
            "mla_query q1 rows 2": ("tokens 16", FASTER),
        },
    )
    assert apply()[0] == 0
    plan = plan_pipeline(str(spec))
    tiles = {
        (step.arch, step.q, step.rows): {x.op: dict(x.tactic) for x in step.launches}
        for step in plan.plans
    }
    for (arch, q, rows), found in tiles.items():
        tuned = arch == "sm_90a" and rows in (3, 4, 8)
        old = {"tile_n": 64, "tokens": 8 if rows <= 8 else 16}
        assert found["o_proj"] == ({"tile_n": 56, "tokens": 8} if tuned else old), (arch, q, rows)
        first = arch == "sm_90a" and rows in (1, 2)
        assert found["mla_query"] == ({"tokens": 16} if first else {}), (arch, q, rows)


def test_fewer_rows_keep_the_kernels_own_tile(spec: Path) -> None:
    record(Path("results.json"), document(spec), {"mla_query q1 rows 8": ("tokens 16", FASTER)})
    code, _, err = apply()
    assert code == 0, err
    plan = plan_pipeline(str(spec))
    assert plan.tactics["mla_query"] == (("sm_90a", 2, ()), ("sm_90a", 8, (("tokens", 16),)))


def test_diff_and_json_write_nothing(spec: Path) -> None:
    record(Path("results.json"), document(spec), {"mode q1 rows 2": ("fork", FASTER)})
    text = spec.read_text()
    code, out, err = apply("--diff")
    assert code == 0 and '+        "1-2": fork\n' in out and "would change overlap.table" in err
    payload = json.loads(apply("--diff", "--format", "json")[1])
    step = next(one for one in payload["steps"] if one["key"] == "mode q1 rows 2")
    assert (step["winner"], step["stands_for"]) == ("fork", [1, 2])
    assert step["gain"] == pytest.approx(0.1, abs=0.002) and payload["tables"] == ["overlap.table"]
    assert spec.read_text() == text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("page: 64}\n  index", "page: 2048}\n  index", "section `caches` has changed"),
        ('"1-4": serial   # measured', '"1-4": fork   # measured', ""),
        (
            'q4: {"4": serial, "5-8": fork}',
            'q4: {"4": serial, "5-8": serial}',
            "`overlap.table` is `serial` at sm_90a q4 rows 8; the run compared with `fork`",
        ),
        ("topk_select, join side,\n", "join side, topk_select,\n", "mode `fork` has changed"),
    ],
)
def test_stale_results_are_refused_by_name(old: str, new: str, said: str, spec: Path) -> None:
    record(Path("results.json"), document(spec), {"mode q1 rows 2": ("fork", FASTER)})
    change(spec, (old, new))
    text = spec.read_text()
    code, _, err = apply()
    if not said:  # what won is there already: nothing is stale, and nothing is left to do
        assert code == 0
        return
    assert code == 1 and "error[KP822]" in err and said in " ".join(err.split())
    assert err.endswith("nothing was written\n") and spec.read_text() == text


def test_changed_geometry_and_kernels_are_stale(spec: Path) -> None:
    plan = document(spec)
    plan["made_from"]["templates"]["kernels/o_proj.py.jinja"] = "0" * 64
    plan["made_from"]["device"] = ""
    record(Path("results.json"), plan, {})
    code, _, err = apply()
    said = "template `kernels/o_proj.py.jinja`, the building blocks in runtime/device have changed"
    assert code == 1 and said in " ".join(err.split())


@pytest.mark.parametrize("own", ["", "overlap:\n  fallback: {fork: serial}  # as before\n"])
def test_table_of_another_file_is_overridden_in_this_one(
    own: str, spec: Path, tmp_path: Path
) -> None:
    child, base = tmp_path / "child.yaml", spec.read_text()
    child.write_text(f"extends: base.yaml\nname: child\n{own}")
    before = table(child)
    wins = {"mode q1 rows 2": ("fork", FASTER), "mode q1 rows 8": ("fork_query", FASTER)}
    record(Path("results.json"), document(child, tiles=1, queries=(1,)), wins)
    words = ["tune", "apply", "child.yaml", "results.json"]
    assert CliRunner().invoke(main, words).exit_code == 0
    assert spec.read_text() == base and child.read_text().startswith("extends: base.yaml\n")
    assert own in child.read_text()
    after = table(child)
    changed = {key: after[key] for key in after if after[key] != before[key]}
    assert changed == {
        ("sm_90a", 1, 1): "fork",
        ("sm_90a", 1, 2): "fork",
        ("sm_90a", 1, 8): "fork_query",
    }
    text = child.read_text()
    assert CliRunner().invoke(main, words).exit_code == 0 and child.read_text() == text


def test_stage_of_another_file_is_not_touched(spec: Path, tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: base.yaml\nname: child\n")
    wins = {"o_proj q1 rows 8": ("tile_n 56, tokens 8", FASTER)}
    record(Path("results.json"), document(child, rows=(8,), queries=(1,), modes=1), wins)
    result = CliRunner().invoke(main, ["tune", "apply", "child.yaml", "results.json"])
    assert result.exit_code == 1
    assert "`stages.o_proj` stands in `base.yaml`, which `child.yaml` extends" in result.stderr
    assert "tune `base.yaml`" in result.stderr


def test_comment_that_would_be_lost_is_a_refusal(spec: Path) -> None:
    change(spec, (KEYED, '  table:\n    "1-4": serial  # small\n    "5-8": fork\n'))
    plan = document(spec, rows=(2,), queries=(1,))
    record(Path("results.json"), plan, {"mode q1 rows 2": ("fork", FASTER)})
    code, _, err = apply()
    assert code == 1 and "a comment inside it would be lost" in err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "`schema` is None, not 'kpipe.tune_results/1'"),
        ("{\n", "line 1 is not JSON"),
        ('{"schema": "kpipe.tune_results/1"}\n', "'plan' is missing"),
    ],
)
def test_other_files_are_refused(text: str, said: str, spec: Path) -> None:
    Path("results.json").write_text(text)
    code, _, err = apply()
    assert code == 2 and "error[KP820]" in err and said in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"step": "x", "round": 0, "us": {}}, "step 'x' is not in its plan"),
        (
            {"step": "mode q1 rows 2", "round": 9, "us": {"nobody": 1.0}},
            "mode q1 rows 2: 'nobody' is no candidate of its plan",
        ),
        ({"step": "mode q1 rows 2", "round": 9, "us": {"fork": -1.0}}, "-1.0 is no time"),
        ({"step": "mode q1 rows 2", "round": 9, "us": {"fork": float("inf")}}, "inf is no time"),
    ],
)
def test_what_was_never_planned_is_refused(line: dict, said: str, spec: Path) -> None:
    record(Path("results.json"), document(spec), {}, lines=(line,))
    code, _, err = apply()
    assert code == 2 and said in err


def test_name_of_a_gpu_cannot_write_yaml(spec: Path) -> None:
    results = record(Path("results.json"), document(spec), {"mode q1 rows 2": ("fork", FASTER)})
    results.write_text(results.read_text().replace("NVIDIA X1", "X\\nname: other"))
    code, _, err = apply()
    assert code == 2 and "`gpu` is" in err


def test_results_of_another_pipeline_are_refused(spec: Path) -> None:
    record(Path("results.json"), document(spec), {})
    change(spec, ("name: layer\n", "name: other\n"))
    code, _, err = apply()
    assert code == 1 and "they are of `layer`, this spec is `other`" in err
