"""From observations to the table: what is promised comes from the checker, the rest was seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kpipe.codegen.cli import main
from kpipe.codegen.proof.observed import experiments, table_of, table_text
from kpipe.codegen.proof.tables import FOLDER, read_table

SHIPPED = FOLDER / "sm_90-580.159.04.json"


def item(document: dict, row: str, mode: str) -> dict:
    return next(one for one in document["experiments"] if (one["row"], one["mode"]) == (row, mode))


def apply(path: str, tmp_path: Path, *words: str):  # noqa: ANN201
    arguments = ["probe", "--apply", path, "--table", str(tmp_path / "table.json"), *words]
    return CliRunner().invoke(main, arguments)


def test_the_shipped_table_comes_out_of_its_own_observations(observed: dict) -> None:
    shipped = read_table(SHIPPED)
    table = table_of(observed, experiments(observed), shipped)
    known = {row.id for row in shipped.rows}
    assert tuple(row for row in table.rows if row.id in known) == shipped.rows
    assert (table.readings, table.rules) == (shipped.readings, shipped.rules)
    assert (table.arch, table.driver) == (shipped.arch, shipped.driver)


def test_the_text_is_that_of_the_shipped_file() -> None:
    assert table_text(read_table(SHIPPED)) == SHIPPED.read_text()


def test_apply_prints_the_table_and_writes_a_file_that_is_read(
    observed: dict, written, tmp_path: Path
) -> None:
    item(observed, "6", "captured")["early"] = 39
    item(observed, "27", "eager")["stale"] = 3
    result = apply(written(observed), tmp_path)
    assert result.exit_code == 0, result.output
    table = read_table(tmp_path / "table.json")
    assert table.row("6").captured == "fresh" and table.row("27").eager == "stale"
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "fake: sm_90, driver 580.159.04"
    assert "27 A(trig); C(pdl) eager sometimes, 3 of 40 stale no" in lines
    assert "2 A(trig); C(pdl wait) captured never fresh yes" in lines
    assert any(line.startswith("m1 holds: ") for line in lines)
    assert any(line.startswith("exit_completes does not hold: ") for line in lines)
    assert any(line.startswith("child graph of A(trig); pdl C(no wait)") for line in lines)
    assert 'semantics = "table.json"' in result.stderr


def test_json_is_the_file(observed: dict, written, tmp_path: Path) -> None:
    result = apply(written(observed), tmp_path, "--format", "json")
    assert json.loads(result.stdout) == json.loads((tmp_path / "table.json").read_text())


def test_another_machine_says_where_it_differs(observed: dict, written, tmp_path: Path) -> None:
    observed.update(arch="sm_100", driver="600.1")
    item(observed, "13", "captured").update(early=40, stale=40)
    item(observed, "30", "captured").update(early=0, stale=0)
    result = apply(written(observed), tmp_path)
    assert result.exit_code == 0, result.output
    said = " ".join(result.stdout.split())
    assert "captured always stale no sm_90, driver 580.159.04: ordered" in said
    assert "exit_completes holds" in said
    assert read_table(tmp_path / "table.json").title == "sm_100, driver 600.1"


def test_a_reading_needs_its_control(observed: dict, written, tmp_path: Path) -> None:
    """Where even stores behind a trigger are never seen late, the trial could not have failed."""
    for mode in ("eager", "captured"):
        item(observed, "27", mode).update(early=0, stale=0)
    assert apply(written(observed), tmp_path).exit_code == 0
    assert not read_table(tmp_path / "table.json").holds("held_exit_visible")


@pytest.mark.parametrize(
    ("row", "mode", "seen", "words"),
    [
        ("2", "captured", {"stale": 1, "early": 40}, "C saw old data behind its wait in 1 of 40"),
        ("10", "eager", {"stale": 40, "early": 40}, "C saw old data behind its wait in 40 of 40"),
        ("16", "eager", {"early": 2}, "C saw old data as it started in 2 of 40"),
        ("22", "mixed", {"stale": 5, "early": 5}, "row 22 (graph; A(trig); graph; C(pdl)), mixed"),
    ],
)
def test_a_broken_promise_stops_everything(
    observed: dict, written, tmp_path: Path, row: str, mode: str, seen: dict, words: str
) -> None:
    item(observed, row, mode).update(seen)
    result = apply(written(observed), tmp_path)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 1 and "error[KP821]" in said
    assert f"row {row} (" in said and words in said
    assert "the documents order A in front of it: " in said
    assert not (tmp_path / "table.json").exists()


def test_an_order_in_time_without_a_promise_may_break(observed: dict, written, tmp_path: Path):
    item(observed, "23", "eager").update(stale=4, early=4)
    assert apply(written(observed), tmp_path).exit_code == 0
    table = read_table(tmp_path / "table.json")
    assert table.row("23").eager == "stale" and not table.holds("fence")


def test_another_graph_than_the_rules_say_is_a_broken_promise(
    observed: dict, written, tmp_path: Path
) -> None:
    edge = item(observed, "10", "captured")["graphs"][0]["edges"][0]
    edge.update(type=0, from_port=0)
    result = apply(written(observed), tmp_path)
    assert result.exit_code == 1
    said = " ".join(result.stderr.split())
    assert "the captured graph: edge A (layer 0) -> C (layer 0) is full, not programmatic" in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema="kpipe.observed/2"), "`schema` is 'kpipe.observed/2', not"),
        (lambda d: d["experiments"].pop(0), "row 1 was not observed, eager: measure all rows"),
        (
            lambda d: d.update(refused=[{"row": "9", "mode": "eager", "error": "cuX: no (1)"}]),
            "row 9, eager, was refused there: cuX: no (1)",
        ),
        (lambda d: d["experiments"][0].pop("stale"), "'stale' is missing"),
        (lambda d: d["experiments"][0].update(stale=41), "row 1: 0 and 41 of 40, eager"),
        (lambda d: d["experiments"][0].update(schedule={"schema": "x"}), "'x' is not kpipe.sch"),
    ],
)
def test_observations_that_cannot_be_used(
    observed: dict, written, tmp_path: Path, change, message: str
) -> None:
    change(observed)
    result = apply(written(observed), tmp_path)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 2 and "error[KP820]: observations `" in said and message in said


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    for name, message in (("x.json", "is not JSON"), ("y.json", "cannot be read: No such file")):
        result = apply(str(tmp_path / name), tmp_path)
        assert result.exit_code == 2 and message in result.stderr
