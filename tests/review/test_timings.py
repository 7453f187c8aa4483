"""Measured times: whose they are, when they count, what is said of a file that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kpipe.codegen.evidence import kernel_digest
from kpipe.codegen.plan.model import PipelinePlan, StepPlan
from kpipe.codegen.review.timings import (
    Measured,
    TimingsError,
    evidence_timings,
    measured_rows,
    measured_step,
    read_timings,
)

BENCH = Path(__file__).parents[2] / "bench" / "results" / "dsa_tp_h200.json"


def entry(what: str = "o_proj", **other: Any) -> dict[str, Any]:
    usual = {"pipeline": "dsa_tp", "method": "_front", "rows": 1, "q": 1, "context": 32768}
    return {**usual, "what": what, "us": 3.0, "floor_us": 1.0, **other}


def written(path: Path, *entries: dict[str, Any], **other: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"gpu": "NVIDIA H200", "timings": [*entries], **other}))
    return path


def step_of(plan: PipelinePlan, arch: str = "sm_90a", rows: int = 1) -> StepPlan:
    return next(s for s in plan.plans if (s.arch, s.rows, s.q) == (arch, rows, 1))


def found(
    path: Path, plan: PipelinePlan, step: StepPlan, folder: Path, method: str = "_front"
) -> Measured | None:
    timings = read_timings(path)
    assert timings is not None
    return measured_step([timings], plan, step, method, folder)


def test_a_committed_run_covers_the_rows_that_it_timed(plans: dict[str, PipelinePlan]) -> None:
    timings = read_timings(BENCH)
    assert timings is not None and (timings.gpu, timings.arch) == ("NVIDIA H200", "sm_90a")
    assert measured_rows([timings], "dsa_tp", "sm_90a") == (1, 4, 16, 64)
    assert measured_rows([timings], "dsa_dcp", "sm_90a") == ()
    plan = plans["dsa_tp"]
    one = measured_step([timings], plan, step_of(plan), "_front", Path("nowhere"))
    data = json.loads(BENCH.read_text())["timings"]
    expected = {e["what"]: e["us"] for e in data if (e["rows"], e["context"]) == (1, 32768)}
    assert one is not None and one.context == 32768
    assert one.layer == expected.pop("layer")
    assert one.launches == expected


def test_times_of_one_gpu_say_nothing_of_another_architecture(
    plans: dict[str, PipelinePlan], tmp_path: Path
) -> None:
    plan = plans["dsa_tp"]
    path = written(tmp_path / "t.json", entry())
    assert found(path, plan, step_of(plan), tmp_path) is not None
    assert found(path, plan, step_of(plan, "sm_100a"), tmp_path) is None
    path = written(tmp_path / "u.json", entry(), arch="sm_100a")
    assert found(path, plan, step_of(plan), tmp_path) is None
    path = written(tmp_path / "v.json", entry(), gpu="NVIDIA X9")
    assert found(path, plan, step_of(plan), tmp_path) is None


def test_other_rows_query_lengths_and_pipelines_are_not_used(
    plans: dict[str, PipelinePlan], tmp_path: Path
) -> None:
    plan = plans["dsa_tp"]
    others = [entry(rows=2), entry(q=4), entry(pipeline="dsa_tp1"), entry("layer")]
    assert found(written(tmp_path / "t.json", *others), plan, step_of(plan), tmp_path) is None


def test_the_layer_is_that_of_the_same_launch_list(
    plans: dict[str, PipelinePlan], tmp_path: Path
) -> None:
    plan = plans["dsa_tp"]
    path = written(tmp_path / "t.json", entry(), entry("layer", us=50.0))
    same = found(path, plan, step_of(plan), tmp_path)
    other = found(path, plan, step_of(plan), tmp_path, "_fork")
    assert same is not None and same.layer == 50.0
    assert other is not None and other.layer is None and other.launches == {"o_proj": 3.0}


def test_the_model_context_comes_first_then_the_longest(
    plans: dict[str, PipelinePlan], tmp_path: Path
) -> None:
    plan = plans["dsa_tp"]
    three = [entry(context=c, us=float(c)) for c in (1024, 8192, 32768)]
    for entries, context in ((three, 32768), (three[:2], 8192)):
        one = found(written(tmp_path / "t.json", *entries), plan, step_of(plan), tmp_path)
        assert one is not None and one.context == context
        assert one.launches == {"o_proj": float(context)}


def test_times_of_other_kernels_are_left_aside(
    plans: dict[str, PipelinePlan], tmp_path: Path
) -> None:
    plan = plans["dsa_tp"]
    kernel = tmp_path / "kernels" / "o_proj.py"
    kernel.parent.mkdir()
    kernel.write_text("spec\nO = 1\n")
    made = {"sha256": kernel_digest(kernel.read_bytes()), "device": {}}
    ran = {"kernels": {"o_proj": made}}
    path = written(tmp_path / "t.json", entry(), **ran)
    assert found(path, plan, step_of(plan), tmp_path) is not None
    kernel.write_text("spec\nO = 2\n")
    assert found(path, plan, step_of(plan), tmp_path) is None
    kernel.write_text("another spec\nO = 1\n")
    assert found(path, plan, step_of(plan), tmp_path) is not None
    ran = {"kernels": {"o_proj": {**made, "device": {"memory.py": "0" * 64}}}}
    path = written(tmp_path / "t.json", entry(), **ran)
    assert found(path, plan, step_of(plan), tmp_path) is None


def test_evidence_is_searched_and_files_without_times_are_passed_over(
    plans: dict[str, PipelinePlan], tmp_path: Path
) -> None:
    plan = plans["dsa_tp"]
    written(tmp_path / "evidence" / "bench.json", entry())
    (tmp_path / "evidence" / "a.json").write_text('{"gpu": "NVIDIA H200", "records": []}')
    (tmp_path / "evidence" / "b.json").write_text("not JSON")
    (tmp_path / "evidence" / "c.json").write_text('{"gpu": "NVIDIA H200", "timings": [1]}')
    timings = evidence_timings(tmp_path)
    assert len(timings) == 1
    one = measured_step(timings, plan, step_of(plan), "_front", tmp_path)
    assert one is not None and one.gpu == "NVIDIA H200"
    assert evidence_timings(tmp_path / "none") == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not JSON", "it is not JSON"),
        ('{"timings": []}', "`gpu` and `timings` are not what `kpipe bench --out` writes"),
        ('{"gpu": "X", "timings": {}}', "`gpu` and `timings` are not"),
        ('{"gpu": "X", "timings": [{"us": 1}]}', "entry {'us': 1} of `timings` lacks"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TimingsError, match="^" + reason.replace("(", r"\(")):
        read_timings(path)


@pytest.mark.parametrize("us", [0, -1, "3", None])
def test_a_time_is_a_positive_number(us: object, tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match="lacks a name, a number or `us`"):
        read_timings(written(tmp_path / "t.json", entry(us=us)))


def test_a_missing_file_and_other_json(tmp_path: Path) -> None:
    with pytest.raises(TimingsError, match="No such file"):
        read_timings(tmp_path / "none.json")
    (tmp_path / "o.json").write_text("[1, 2]")
    assert read_timings(tmp_path / "o.json") is None
