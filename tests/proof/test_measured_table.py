"""The file of measured semantics: read strictly, chosen by settings and targets, cited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from proof_chains import MAIN, on, pdl, plain, program, reads, writes
from spec_project import findings_of, make_project, plan_of

from kpipe.codegen.cli import main
from kpipe.codegen.diagnostics import SpecError
from kpipe.codegen.proof.cite import lost_at, rests_of, settled
from kpipe.codegen.proof.order import Order
from kpipe.codegen.proof.races import check, unfenced
from kpipe.codegen.proof.tables import FOLDER, read_table, shipped, table_for

SHIPPED = FOLDER / "sm_90-580.159.04.json"
SILENT = ("between_layers: waits", "between_layers: silent")


def written(root: Path, change=lambda data: None, name: str = "own.json") -> Path:  # noqa: ANN001
    data = json.loads(SHIPPED.read_text())
    change(data)
    path = root / name
    path.write_text(json.dumps(data))
    return path


def rows(data: dict, number: int) -> dict:
    return data["rows"][number]


WRONG = {
    "`version` is 2": lambda d: d.update(version=2),
    "`version` is missing": lambda d: d.pop("version"),
    "`driver` is missing": lambda d: d.pop("driver"),
    "`gpu` is not known; known: version, arch": lambda d: d.update(gpu="H200"),
    "`rows[3].eager` is 'late'; one of ordered": lambda d: rows(d, 3).update(eager="late"),
    "`rows[0].promised` is not": lambda d: rows(d, 0).update(promised=[1, 0]),
    "`rows[2].sentence` is missing": lambda d: rows(d, 2).pop("sentence"),
    "`rows` has row '2' twice": lambda d: rows(d, 0).update(id="2"),
    "`rules.stream` names row '77'": lambda d: d["rules"].update(stream=["77"]),
    "`rules.join` is missing": lambda d: d["rules"].pop("join"),
    "`readings[0].rows` is not a list": lambda d: d["readings"][0].update(rows=[]),
    "`readings[1].holds` is not true": lambda d: d["readings"][1].update(holds="yes"),
    "`readings` lacks the reading 'm1'": lambda d: d["readings"].pop(0),
    "`arch` is not a text": lambda d: d.update(arch=90),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_table_is_refused_by_file_and_key(message: str, tmp_path: Path) -> None:
    path = written(tmp_path, WRONG[message])
    with pytest.raises(SpecError) as raised:
        read_table(path)
    (finding,) = raised.value.diagnostics
    assert finding.code == "KP809" and finding.help
    assert finding.message.startswith(f"semantics table `{finding.span.path}`: ")
    assert finding.span.path.endswith("own.json") and message in finding.message


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"version": 1,\n oops}')
    for name, message in (("x.json", "is not JSON"), ("y.json", "cannot be read")):
        with pytest.raises(SpecError, match=message):
            read_table(tmp_path / name)


def test_every_table_that_ships_is_read_and_named_after_what_it_holds() -> None:
    assert shipped()
    for path in shipped():
        table = read_table(path)
        assert path.name == f"{table.arch}-{table.driver}.json"


def test_a_target_without_a_table_says_so(tmp_path: Path) -> None:
    spec = str(make_project(tmp_path) / "pipelines" / "dsa_dcp.yaml")
    both = table_for(spec, ("sm_90a", "sm_100a"))
    assert (both.table.title, both.without) == ("sm_90, driver 580.159.04", ("sm_100",))
    assert both.note == (
        "cites what was measured on sm_90, driver 580.159.04; no table for sm_100: the rows of "
        "sm_90 are cited"
    )
    assert table_for(spec, ("sm_90a",)).without == ()


def test_the_project_names_its_own_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_project(tmp_path, [("dsa_tp.yaml", *SILENT)])
    written(root, lambda d: d.update(arch="sm_100", driver="600.1"))
    (root / "pyproject.toml").write_text('[tool.kpipe]\nsemantics = "own.json"\n')
    monkeypatch.chdir(root)
    result = CliRunner().invoke(main, ["check", "pipelines/dsa_tp.yaml"])
    said = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    assert "measured on sm_100, driver 600.1; no table for sm_90: the rows of sm_100" in said
    (root / "own.json").unlink()
    result = CliRunner().invoke(main, ["check", "pipelines/dsa_tp.yaml"])
    assert result.exit_code == 2 and "KP809" in result.output


def test_a_clean_check_reads_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_project(tmp_path)
    (root / "pyproject.toml").write_text('[tool.kpipe]\nsemantics = "none.json"\n')
    monkeypatch.chdir(root)
    result = CliRunner().invoke(main, ["check", "pipelines/dsa_dcp.yaml"])
    assert result.exit_code == 0 and "cites" not in result.stdout


def test_json_always_names_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_project(tmp_path))
    result = CliRunner().invoke(main, ["check", "pipelines/dsa_dcp.yaml", "--format", "json"])
    (pipeline,) = json.loads(result.stdout)["pipelines"]
    assert pipeline["semantics"] == {
        "arch": "sm_90",
        "driver": "580.159.04",
        "version": 1,
        "without": ["sm_100"],
    }


def test_a_hold_of_the_proof_cites_a_row(tmp_path: Path) -> None:
    plan = plan_of(make_project(tmp_path, [("dsa_tp.yaml", *SILENT)]))
    held = {launch.pdl.release_reason for s in plan.plans for launch in s.launches}
    assert "held: mla_value rewrites `gated` behind a silent launch (row 12)" in held
    again = plan_of(tmp_path)  # the remembered proof says the same
    assert again == plan


def test_generated_code_follows_the_table_that_it_cites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_project(tmp_path, [("dsa_tp.yaml", *SILENT)])
    monkeypatch.chdir(root)
    monkeypatch.setenv("KPIPE_CACHE_DIR", str(tmp_path / "cache"))
    layer = root / "generated" / "dsa_tp" / "layer.py"

    def generate() -> str:
        result = CliRunner().invoke(main, ["generate", "pipelines/dsa_tp.yaml"])
        assert result.exit_code == 0, result.output
        return result.stdout

    generate()
    assert "behind a silent launch (row 12)" in layer.read_text()
    assert all(len(line) <= 120 for line in layer.read_text().splitlines() if "(row" in line)
    (root / "own.json").write_text(SHIPPED.read_text().replace('"12"', '"XII"'))
    (root / "pyproject.toml").write_text('[tool.kpipe]\nsemantics = "own.json"\n')
    generate()
    assert "(row XII)" in layer.read_text()
    assert "unchanged" in generate()
    (root / "own.json").write_text(SHIPPED.read_text().replace('"12"', '"12b"'))
    generate()
    assert "(row 12b)" in layer.read_text()


def test_findings_name_rule_rows_and_readings(tmp_path: Path) -> None:
    root = make_project(tmp_path, [("dsa_dcp.yaml", *SILENT)])
    found = findings_of(str(root / "pipelines" / "dsa_dcp.yaml"))
    assert found
    for finding in found:
        rule, row, *readings = finding.rests
        assert rule.startswith("rule `graph_start`: o_reduce to between layers")
        assert row.startswith("row 30: A(trig); pdl silent;") and "580.159.04" in row
        assert readings and all("no document promises it" in line for line in readings)


A = plain("A", writes("x"), "early")
M1 = program(on(MAIN, A, pdl("B"), pdl("C", reads("x"), waits=True)), captured=False)
FENCED = program(
    on(MAIN, A, pdl("B", waits=True, trigger="after_wait"), pdl("C", reads("x"))), captured=False
)


@pytest.mark.parametrize(("given", "reading"), [(M1, "m1"), (FENCED, "fence")])
def test_a_reading_that_does_not_hold_excuses_nothing(
    given,
    reading: str,
    tmp_path: Path,  # noqa: ANN001
) -> None:
    (race,) = (*check(given), *unfenced(given))
    assert (race.verdict, race.assumption) == ("assumed", reading)
    lost = lost_at(given, race, Order(given))
    good = read_table(SHIPPED)
    assert settled(race, good) == race
    assert f"assumed safe under `{reading}`" in rests_of(race, lost, good, captured=False)[-1]

    def fails(data: dict) -> None:
        next(r for r in data["readings"] if r["id"] == reading).update(holds=False)

    bad = read_table(written(tmp_path, fails))
    assert (settled(race, bad).verdict, settled(race, bad).assumption) == ("racy", "")
    last = rests_of(race, lost, bad, captured=False)[-1]
    assert last.startswith(f"racy: `{reading}`") and "was seen to fail" in last
    assert "assumed" not in " ".join(rests_of(race, lost, bad, captured=False))
