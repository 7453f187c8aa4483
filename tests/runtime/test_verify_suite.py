"""The whole suite of `kpipe verify`: what it runs, that it finds what is wrong, how it says so."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from layer_factory import LayerFactory

from kpipe.runtime import verify_all
from kpipe.runtime.compare import compare_trial
from kpipe.runtime.generated_folder import load_layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.oracle.compare import tie_violations
from kpipe.runtime.trial import Case, Trial, run_case
from kpipe.runtime.verify import main
from kpipe.runtime.verify_suite import LARGE_CACHE, Agreement, agreements, run_methods, suite

TP = "extends: dsa_tp.yaml\nname: {name}\ngeometry: small\nparallel: {{tp: 4}}\n"
MODES = (
    TP
    + """\
overlap:
  table:
    sm_90a:
      q1: {{"1": serial, "2": front, "3-7": fork, "8-32": late, "33-64": fork_split}}
      q4: {{"4-32": serial, "33-64": fork_split}}
    sm_100a:
      q1: {{"1-32": fork, "33-64": fork_split}}
      q4: {{"4-32": fork, "33-64": fork_split}}
"""
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> LayerFactory:
    return LayerFactory(tmp_path_factory.mktemp("suite"))


@pytest.fixture(scope="module")
def modes(project: LayerFactory) -> Path:
    return project.folder("suite_modes", MODES.format(name="suite_modes"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    return code, *capsys.readouterr()


def test_everything_holds_on_the_cpu(capsys: pytest.CaptureFixture[str], modes: Path) -> None:
    code, out, err = run(capsys, str(modes), "--suite", "--backend", "reference")
    assert code == 0, out
    lines = out.splitlines()
    assert lines[0] == "suite_modes on sm_90a, reference backend, this machine's CPU"
    assert re.search(r"(?m)^  tied scores +4 +1 +1 ", out)
    assert re.search(r"(?m)^  the longest context +1 +1 +1 .* yes$", out)
    assert (
        "  front against serial_index_front: the same ops, every bit of the output equal" in lines
    )
    assert any(
        line.startswith("  fork_sparse_decode against serial_index_front: other ops")
        for line in lines
    )
    assert re.fullmatch(
        r"ok: 10 cases with \d+ comparisons, 5 pairs of modes, all within their bounds", lines[-1]
    )
    assert "layers: tied scores ...\n" in err
    assert not (modes / "evidence").exists(), "no GPU, no evidence"


def test_a_wrong_layer_fails_every_case(
    capsys: pytest.CaptureFixture[str], project: LayerFactory
) -> None:
    folder = project.folder("suite_scaled", TP.format(name="suite_scaled"))
    text = (folder / "ops.py").read_text()
    (folder / "ops.py").write_text(text.replace("SOFTMAX_SCALE = 0.1", "SOFTMAX_SCALE = 0.2"))
    code, out, _ = run(capsys, str(folder), "--suite", "--backend", "reference", "--format", "json")
    found = json.loads(out)
    assert code == 1 and found["ok"] is False
    assert [case["ok"] for case in found["cases"]] == [False] * 10
    assert found["cases"][0]["wrong"][0].startswith("sparse_core latent, rank 0: ")


def test_a_higher_id_among_ties_is_found(project: LayerFactory, modes: Path) -> None:
    """Equal scores, so that only the rule tells the two selections apart."""
    folder = project.folder("suite_high", MODES.format(name="suite_high"))
    text = (folder / "ops.py").read_text()
    assert '"tie": "low_id"' in text
    (folder / "ops.py").write_text(text.replace('"tie": "low_id"', '"tie": "high_id"'))
    high, low = load_layer(folder), load_layer(modes)
    case = next(n.case for n in suite(high, "sm_90a", "reference") if n.name == "tied scores")
    (trial,) = run_case(high, case)
    assert broken_ties(trial) == 0.0, "it says high_id and does it"
    trial.ranks[0].layer = low()
    assert broken_ties(trial) > 0.0, "the same selection where the rule is low_id"


def broken_ties(trial: Trial) -> float:
    (rule,) = [error for error in compare_trial(trial) if error.what == "tie rule"]
    assert rule.ok == (rule.error == 0.0)
    return rule.error


def test_modes_that_differ_are_told_apart(modes: Path) -> None:
    layer = load_layer(modes)
    trials = run_methods(layer, "sm_90a", "reference")
    trials["_front"].ranks[0].out[0, 0] += 1
    trials["_late"].ranks[0].out.mul_(2)
    found = {one.second: one for one in agreements(layer, trials)}
    assert found["_front"] == Agreement("_serial_index_front", "_front", True, 1.0, 0.0)
    assert not found["_late"].ok and found["_late"].error > 0.0


def test_modes_that_cannot_run_are_told_beside_what_was_found(
    modes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: object) -> dict[str, Trial]:
        raise LayerError("never built")

    layer = load_layer(modes)
    monkeypatch.setattr(verify_all, "run_methods", refused)
    monkeypatch.setattr(verify_all, "suite", lambda *words: suite(*words)[:1])
    report = verify_all.verify_all(layer, modes, "sm_90a", "reference", str, again=False)
    assert report.cases[0].ok and not report.ok
    lines = verify_all.as_text(report).splitlines()
    assert "WRONG: modes on the same inputs: LayerError: never built" in lines
    assert lines[-1].startswith("FAILED: the modes of 1 cases with ")


def test_records_of_launches_outlive_layers_that_never_end(
    modes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Judged:
        def __init__(self, *words: object) -> None:
            self.records, self.failures = [{"kernel": "rms_norm"}], ["one"]
            self.skipped, self.without_case = {"known"}, {"unknown"}

        def run(self, said: object) -> None:
            pass

    def cut_off(*words: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kpipe.runtime.launch_check.LaunchCheck", Judged)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(verify_all, "suite", cut_off)
    handed: list[verify_all.FullReport] = []
    with pytest.raises(KeyboardInterrupt):
        verify_all.verify_all(
            load_layer(modes), modes, "sm_90a", "cuda", str, again=True, launched=handed.append
        )
    (report,) = handed
    assert report.records == [{"kernel": "rms_norm"}] and report.launch_failures == ["one"]
    assert report.skipped == {"known"} and report.without_case == ("unknown",)


def test_the_gpu_suite_is_captured_and_reaches_beyond_4_gib(modes: Path) -> None:
    layer = load_layer(modes)
    cases = {named.name: named.case for named in suite(layer, "sm_90a", "cuda")}
    assert [name for name, case in cases.items() if not case.captured] == ["eager"]
    assert cases["edges of pages and top-k"].layers == 3
    assert cases["edges of pages and top-k"].replays == 100
    assert cases["caches beyond 4 GiB"].cache_bytes == LARGE_CACHE > 2**32
    assert {case.q for case in cases.values()} == {1, 4}


def test_pages_of_a_large_cache_lie_anywhere_in_it(modes: Path) -> None:
    layer = load_layer(modes)
    (trial,) = run_case(layer, Case((70, 33), 1, "sm_90a", cache_bytes=2**20))
    cache = trial.ranks[0].latent
    assert cache.data.numel() >= 2**20
    used = (cache.request >= 0).any(1).nonzero().flatten()
    assert int(used.max() - used.min()) > 4 * len(used)


# -- ties -----------------------------------------------------------------------------------------

KEYS = torch.tensor([[1], [2], [1], [1], [2]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("chosen", "low", "high"),
    [
        ([0, 1, 2, 3, 4], 0, 0),
        ([0, 2], 0, 1),
        ([2, 3], 1, 0),
        ([3, 4], 2, 0),
        ([1], 0, 1),
        ([], 0, 0),
    ],
)
def test_ties(chosen: list[int], low: int, high: int) -> None:
    positions = torch.tensor(chosen, dtype=torch.int64)
    assert tie_violations(KEYS, positions) == low
    assert tie_violations(KEYS, positions, low_id=False) == high


# -- what is refused ------------------------------------------------------------------------------


def test_launches_need_a_gpu(capsys: pytest.CaptureFixture[str], modes: Path) -> None:
    assert run(capsys, str(modes), "--launches") == (
        2,
        "",
        "error: --launches needs a GPU that the layer is generated for\n",
    )


def test_the_suite_takes_no_case(capsys: pytest.CaptureFixture[str], modes: Path) -> None:
    assert run(capsys, str(modes), "--suite", "--lengths", "5") == (
        2,
        "",
        "error: --suite runs its own cases; leave out --lengths\n",
    )
