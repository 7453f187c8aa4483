"""`kpipe bench --against`: which times moved, on files whose moves were put in by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kpipe.runtime.bench_against import main

STEADY = (99.5, 100.0, 100.5)  # medians of a time that scatters by half a percent


def run_of(path: Path, times: dict[tuple[str, int], tuple[float, ...]], **changed: Any) -> Path:
    """A file of bench with these medians by what was timed and rows."""
    entries = [
        {
            "pipeline": "dsa_tp",
            "what": what,
            "method": changed.get("method", "_front"),
            "rows": rows,
            "q": 1,
            "context": 32768,
            "us": sorted(medians)[len(medians) // 2],
            "floor_us": 1.0,
            "medians": list(medians) if len(medians) > 1 else [],
        }
        for (what, rows), medians in times.items()
    ]
    document = {"gpu": changed.get("gpu", "GPU X"), "timings": entries}
    document |= {key: changed[key] for key in ("geometry", "kernels") if key in changed}
    path.write_text(json.dumps(document))
    return path


def scaled(factor: float) -> tuple[float, ...]:
    """The steady medians, slower by a factor."""
    return tuple(us * factor for us in STEADY)


def compared(old: Path, new: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    """Exit code and JSON of a comparison."""
    code = main([str(new), "--against", str(old), "--format", "json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("factor", "verdict", "code"),
    [(1.05, "slower", 1), (0.95, "faster", 0), (1.008, "within", 0), (0.992, "within", 0)],
)
def test_a_move_beyond_the_spread_is_named(
    factor: float,
    verdict: str,
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    old = run_of(tmp_path / "old.json", {("layer", 1): STEADY, ("o_proj", 1): STEADY})
    new = run_of(tmp_path / "new.json", {("layer", 1): STEADY, ("o_proj", 1): scaled(factor)})
    found, payload = compared(old, new, capsys)
    verdicts = {pair["what"]: pair["verdict"] for pair in payload["pairs"]}
    assert (found, verdicts) == (code, {"layer": "within", "o_proj": verdict})
    moved = next(pair for pair in payload["pairs"] if pair["what"] == "o_proj")
    assert moved["ratio"] == pytest.approx(factor)
    # The new best over the old worst, and the new worst over the old best.
    assert moved["between"] == pytest.approx([factor * 99.5 / 100.5, factor * 100.5 / 99.5], 1e-4)


def test_wide_spread_hides_the_same_move(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run_of(tmp_path / "old.json", {("layer", 1): (95.0, 100.0, 106.0)})
    new = run_of(tmp_path / "new.json", {("layer", 1): scaled(1.05)})
    assert compared(old, new, capsys)[0] == 0


def test_tiny_move_of_a_tiny_launch_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run_of(tmp_path / "old.json", {("query_norm", 1): (1.70, 1.71, 1.72)})
    new = run_of(tmp_path / "new.json", {("query_norm", 1): (1.98, 1.99, 2.00)})
    assert compared(old, new, capsys)[0] == 0


def test_text_says_what_moved_and_whether_its_kernel_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = {("layer", 4): STEADY, ("o_proj", 4): STEADY, ("packed_gemm", 4): STEADY}
    kernels = {"o_proj": {"sha256": "a"}, "packed_gemm": {"sha256": "b"}}
    old = run_of(tmp_path / "old.json", times, kernels=kernels)
    slower = {what: scaled(1.1) for what in times}
    kernels = {"o_proj": {"sha256": "c"}, "packed_gemm": {"sha256": "b"}}
    new = run_of(tmp_path / "new.json", slower, kernels=kernels, method="_fork")
    assert main([str(new), "--against", str(old)]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "slower: layer (4 rows, q1, 32K) x1.100 (_front -> _fork); "
        "o_proj (4 rows, q1, 32K) x1.100 (kernel changed); "
        "packed_gemm (4 rows, q1, 32K) x1.100 (kernel is the same)",
        "faster: nothing",
    ]


def test_times_without_a_spread_get_a_stated_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = run_of(tmp_path / "old.json", {("layer", 1): (100.0,)})
    new = run_of(tmp_path / "new.json", {("layer", 1): (105.0,)})
    assert main([str(new), "--against", str(old)]) == 0
    assert "3 % of each time are taken for it" in capsys.readouterr().out
    new = run_of(tmp_path / "new.json", {("layer", 1): (110.0,)})
    assert main([str(new), "--against", str(old)]) == 1


def test_what_only_one_run_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = run_of(tmp_path / "old.json", {("layer", 1): STEADY, ("layer", 4): STEADY})
    new = run_of(tmp_path / "new.json", {("layer", 1): STEADY, ("o_proj", 1): STEADY})
    assert compared(old, new, capsys)[1]["not_compared"] == [
        f"dsa_tp 4 rows, q1, 32K only in {old}",
        f"dsa_tp 1 rows, q1, 32K: o_proj only in {new}",
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ({"gpu": "GPU X"}, {"gpu": "GPU Y"}, "GPU is GPU X in {old} and GPU Y in {new}"),
        (
            {"geometry": {"hidden": 7168}},
            {"geometry": {"hidden": 4096}},
            "`hidden` is 7168 in {old} and 4096 in {new}",
        ),
    ],
)
def test_other_machine_or_model_is_refused_by_name(
    old: dict,
    new: dict,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = run_of(tmp_path / "old.json", {("layer", 1): STEADY}, **old)
    second = run_of(tmp_path / "new.json", {("layer", 1): STEADY}, **new)
    assert main([str(second), "--against", str(first)]) == 2
    expected = said.format(old=first, new=second)
    assert capsys.readouterr().err == f"error: nothing to compare: {expected}\n"


def test_other_rows_alone_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = run_of(tmp_path / "old.json", {("layer", 1): STEADY})
    new = run_of(tmp_path / "new.json", {("layer", 4): STEADY})
    assert main([str(new), "--against", str(old)]) == 2
    said = f"dsa_tp 1 rows, q1, 32K only in {old}; dsa_tp 4 rows, q1, 32K only in {new}"
    assert capsys.readouterr().err == f"error: nothing to compare: {said}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("{}", "is not what `kpipe bench --out` writes: no `gpu` or `timings`"),
        ('{"gpu": "X", "timings": [{"us": 1}]}', "lacks a name, a number or its time"),
    ],
)
def test_unusable_file_is_named(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.json").write_text(text)
    new = run_of(tmp_path / "new.json", {("layer", 1): STEADY})
    assert main([str(new), "--against", str(tmp_path / "old.json")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "old.json") in error and said in error


def test_option_of_a_measurement_is_refused_for_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run.json", {("layer", 1): STEADY})
    assert main([str(run), "--against", str(run), "--rows", "4"]) == 2
    said = f"error: `--rows` is for a folder that is timed now, and `{run}` is none\n"
    assert capsys.readouterr().err == said


def test_two_files_need_no_torch(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run.json", {("layer", 1): STEADY})
    code = (
        "import sys; from kpipe.runtime.bench_against import main; "
        f"main([{str(run)!r}, '--against', {str(run)!r}]); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
