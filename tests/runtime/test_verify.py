"""`kpipe verify`: what it prints, how it exits, and that it can say no."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from layer_factory import LayerFactory

from kpipe.runtime import trial, verify
from kpipe.runtime.generated_folder import layer_of_step, load_layer
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.oracle.compare import declared_bounds
from kpipe.runtime.trial import Case
from kpipe.runtime.verify import default_lengths, main

TP = "extends: dsa_tp.yaml\nname: tiny_tp\ngeometry: small\nparallel: {tp: 4}\n"
DCP = "extends: dsa_dcp.yaml\nname: tiny_dcp\ngeometry: small\nparallel: {tp: 2, dcp: 2}\n"
# Whatever `python -m kpipe.runtime.verify` has to do without.
ABSENT = ("pydantic", "ruamel", "ruamel.yaml", "jinja2", "click", "rich", "kpipe.codegen")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> LayerFactory:
    return LayerFactory(tmp_path_factory.mktemp("verify"))


@pytest.fixture(scope="module")
def tp(project: LayerFactory) -> str:
    return str(project.folder("tiny_tp", TP))


@pytest.fixture(scope="module")
def dcp(project: LayerFactory) -> str:
    return str(project.folder("tiny_dcp", DCP))


def test_a_layer_of_one_step_launches_that_step_alone(tp: str) -> None:
    layer_class = load_layer(tp)
    every, method = layer_class().calls("sm_90a"), layer_class.TABLE["sm_90a", 1][16]
    one = layer_of_step(layer_class, "sm_90a", 9, 1)  # padded to 16 rows
    assert {("sm_90a", 1): {16: method}} == one.TABLE
    assert {call.rows for call in one.calls()} == {16} and set(one.calls()) < set(every)
    assert layer_of_step(layer_class, "sm_90a", 9, 1, "other").TABLE["sm_90a", 1] == {16: "other"}
    assert layer_class().calls("sm_90a") == every
    with pytest.raises(LayerError, match="65 rows; declared for q 1 are 1 to 64"):
        layer_of_step(layer_class, "sm_90a", 65, 1)


def test_a_case_on_a_gpu_makes_ready_what_it_launches(tp: str) -> None:
    layer_class = load_layer(tp)
    case = Case((5, 70, 1) * 3, 1, "sm_90a")
    assert trial._layer(layer_class, case).TABLE is layer_class.TABLE
    on_gpu = trial._layer(layer_class, replace(case, backend="cuda"))
    assert {call.rows for call in on_gpu.calls()} == {16}
    named = trial._layer(layer_class, replace(case, method="other"))
    assert named.TABLE == {("sm_90a", 1): {16: "other"}}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    return code, *capsys.readouterr()


TABLE = """\
tiny_dcp on sm_100a, reference backend: rows 3, q 1, ranks 0, 1 of 2, seed 0
lengths 70, 1, 0

layer 0: _wait_index_gemm_dsa_index_prims_ts
  stage        what            error    bound    rank  ok
  projection   q_a             E        2.0e-03  R     yes
  projection   kv_a            E        2.0e-03  R     yes
  projection   wk              E        2.0e-03  R     yes
  projection   wv              E        2.0e-03  R     yes
  projection   gate            E        2.0e-03  R     yes
  query        q_c             E        2.0e-03  R     yes
  query        latent_kv rows  E        7.8e-03  R     yes
  indexer      index_kv rows   E        7.8e-03  R     yes
  indexer      index_q8        E        2.3e-02  R     yes
  indexer      index_w         E        3.9e-03  R     yes
  indexer      selection       E        4.7e-02  R     yes
  sparse_core  partial         E        1.6e-02  R     yes
  value        gated           E        2.0e-02  R     yes
  value        inactive rows   E        0.0e+00  R     yes
  o_proj       out             E        2.0e-02  R     yes
  o_proj       inactive rows   E        0.0e+00  R     yes

ok: 16 comparisons, all within their bounds
"""


def test_the_table(capsys: pytest.CaptureFixture[str], dcp: str) -> None:
    """Only the errors, and which rank has the largest, depend on the machine's arithmetic."""
    code, out, err = run(capsys, dcp, "--lengths", "70,1,0", "--arch", "sm_100a")
    assert (code, err) == (0, "")
    found = re.sub(
        r"(?m)  \d\.\de[+-]\d\d(  \d\.\de[+-]\d\d  )[01](?=     yes$)", r"  E      \1R", out
    )
    assert found == TABLE


def test_chained_layers_and_ranks_in_turn(capsys: pytest.CaptureFixture[str], tp: str) -> None:
    chained = ["--layers", "2", "--q", "4", "--seed", "5", "--lengths", "70,129"]
    code, out, err = run(capsys, tp, "--virtual-ranks", "3", *chained)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == (
        "tiny_tp on sm_90a, reference backend: rows 8, q 4, ranks 0, 1, 2 of 4, seed 5"
    )
    assert [line for line in lines if line.startswith("layer")] == [
        "layer 0: _apart_index",
        "layer 1: _apart_index",
    ]
    assert lines[-1] == "ok: 28 comparisons, all within their bounds"


def test_json_is_one_object(capsys: pytest.CaptureFixture[str], tp: str) -> None:
    arguments = ["--format", "json", "--stop-after", "indexer", "--lengths", "70, 5"]
    code, out, _ = run(capsys, tp, *arguments)
    found = json.loads(out)
    assert code == 0 and found["ok"] is True
    about = {name: found[name] for name in found if name not in ("layers", "ok")}
    assert about == {
        "pipeline": "tiny_tp",
        "backend": "reference",
        "captured": False,
        "processes": False,
        "arch": "sm_90a",
        "q": 1,
        "lengths": [70, 5],
        "seed": 0,
        "stop_after": "indexer",
        "ranks": [0],
        "of_ranks": 4,
    }
    (layer,) = found["layers"]
    assert (layer["layer"], layer["method"]) == (0, "_apart_index")
    assert {check["stage"] for check in layer["checks"]} == {"projection", "indexer"}
    last = layer["checks"][-1]
    assert set(last) == {"stage", "what", "error", "bound", "rank", "ok", "reason"}
    assert last["what"] == "selection" and last["bound"] == declared_bounds()["selection"]


def test_default_lengths_are_short_and_long(capsys: pytest.CaptureFixture[str], tp: str) -> None:
    assert default_lengths(2048, 1) == (2567, 1, 64, 65, 2048, 0)
    assert default_lengths(16, 4) == (27, 4, 64, 65, 16, 0)
    code, out, _ = run(capsys, tp)
    assert code == 0 and "lengths 27, 1, 64, 65, 16, 0\n" in out


# -- saying no ----------------------------------------------------------------------------------


def broken(project: LayerFactory, name: str, file: str, old: str, new: str) -> str:
    """A generated folder with one edit."""
    folder = project.folder(name, TP.replace("tiny_tp", name))
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    return str(folder)


def test_a_wrong_constant_is_found(
    capsys: pytest.CaptureFixture[str], project: LayerFactory
) -> None:
    folder = broken(project, "scaled", "ops.py", "SOFTMAX_SCALE = 0.1", "SOFTMAX_SCALE = 0.2")
    code, out, _ = run(capsys, folder, "--lengths", "70,33")
    assert code == 1
    assert re.search(r"(?m)^  sparse_core  latent +\S+  1\.6e-02  0     NO$", out)
    assert re.search(r"(?m)^  indexer      selection +\S+  4\.7e-02  0     yes$", out)
    assert out.splitlines()[-1] == (
        "FAILED: 3 of 14 comparisons beyond their bounds: sparse_core latent (layer 0, rank 0), "
        "value gated (layer 0, rank 0), o_proj out (layer 0, rank 0)"
    )
    code, out, _ = run(capsys, folder, "--stop-after", "indexer")
    assert code == 0, "the stages ahead of the wrong one are right"


@pytest.mark.parametrize(
    ("op", "verdict"),
    [
        (
            "o_proj",
            "FAILED: 1 of 14 comparisons beyond their bounds: o_proj out (layer 0, rank 0)",
        ),
        (
            "sparse_decode",
            "FAILED: 2 of 13 comparisons beyond their bounds: value nothing (layer 0, rank 0), "
            "o_proj out (layer 0, rank 0)",
        ),
    ],
)
def test_what_was_not_launched_is_missed(
    capsys: pytest.CaptureFixture[str], project: LayerFactory, op: str, verdict: str
) -> None:
    """Poison that nobody overwrote is no result, and never passes for one."""
    nothing = "(lambda *operands, **named: None)("
    folder = broken(project, f"without_{op}", "layer.py", f"self.{op}(", nothing)
    code, out, _ = run(capsys, folder, "--lengths", "70,33,5,2,9")
    assert code == 1
    assert out.splitlines()[-1] == verdict


def test_an_error_inside_the_layer_is_a_finding(
    capsys: pytest.CaptureFixture[str], project: LayerFactory
) -> None:
    """Rows that nobody selected, and a rank that waits for words that nobody sends."""
    nothing = "(lambda *operands, **named: None)("
    folder = broken(project, "unselected", "layer.py", "self.topk_select(", nothing)
    code, out, err = run(capsys, folder, "--lengths", "70,33,5,2,9")
    assert (code, err) == (1, "")
    assert re.fullmatch(
        r"FAILED: the layer raised ValueError: latent_kv: block \d+ is outside 0\.\.8\n", out
    )
    silent = project.folder("silent", DCP.replace("tiny_dcp", "silent"))
    text = (silent / "layer.py").read_text().replace("self.topk_local(", nothing)
    (silent / "layer.py").write_text(text)
    code, out, err = run(capsys, str(silent), "--lengths", "70", "--format", "json")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert found["ok"] is False
    assert re.fullmatch(
        r"MailboxTimeout: mailbox candidates, parity 0, stage topk_merge, rank [01]: rank 0 has "
        r"not written \(every rank waits or has ended\); .*; raised by rank [01] of 2",
        found["raised"],
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--stop-after softmax",
            "tiny_tp: no stage 'softmax'; stages: projection, indexer, "
            "query, sparse_core, value, o_proj",
        ),
        ("--arch sm_80", "tiny_tp: no plan for sm_80; generated for sm_90a, sm_100a"),
        ("--q 2", "tiny_tp: q 2 is not declared; declared: 1, 4"),
        ("--virtual-ranks 5", "--virtual-ranks 5: tiny_tp is generated for 4 ranks"),
        ("--virtual-ranks 0", "--virtual-ranks 0: tiny_tp is generated for 4 ranks"),
        ("--lengths 70,x", "--lengths: 'x' is not a number of tokens"),
        ("--lengths 70,-1", "--lengths: '-1' is not a number of tokens"),
        ("--lengths 513", "--lengths: 513 tokens, tiny_tp is generated for 512"),
        ("--layers 0", "--layers 0: at least one layer"),
        ("--build some/where", "--build: the reference backend runs no kernels"),
        (
            "--concurrent",
            "--concurrent needs --backend cuda and a context-parallel layer",
        ),
        (
            "--stop-after query --layers 2",
            "--stop-after cuts off the output that the next of --layers reads",
        ),
        (
            "--backend metal",
            "argument --backend: invalid choice: 'metal' (choose from "
            "'auto', 'reference', 'cuda'); see --help",
        ),
        ("--virtual-ranks two", "argument --virtual-ranks: invalid int value: 'two'; see --help"),
    ],
)
def test_what_cannot_be_run(
    capsys: pytest.CaptureFixture[str], tp: str, arguments: str, text: str
) -> None:
    assert run(capsys, tp, *arguments.split()) == (2, "", f"error: {text}\n")


def test_too_many_rows(capsys: pytest.CaptureFixture[str], tp: str) -> None:
    code, out, err = run(capsys, tp, "--lengths", ",".join(["3"] * 65))
    assert (code, out) == (2, "")
    assert err == "error: tiny_tp: 65 rows; declared for q 1 are 1 to 64\n"


def test_all_ranks_that_exchange_data_run(capsys: pytest.CaptureFixture[str], dcp: str) -> None:
    assert run(capsys, dcp, "--virtual-ranks", "1") == (
        2,
        "",
        "error: --virtual-ranks 1: tiny_dcp is generated for 2 ranks that exchange data; all of "
        "them have to run\n",
    )
    assert run(capsys, dcp, "--virtual-ranks", "2", "--lengths", "5")[0] == 0


def test_ranks_that_all_run_describe_no_case(tp: str, dcp: str) -> None:
    """On a GPU `--virtual-ranks` leaves it at the suite where there is no other choice."""
    for folder, ranks, suite in ((dcp, "2", True), (tp, "2", False)):
        words = [folder, "--virtual-ranks", ranks]
        layer_class, options = load_layer(folder), verify._parser().parse_args(words)
        case = Case((5,), backend="cuda")
        assert verify._wants_suite(layer_class, options, case) == suite


def test_the_cuda_backend_is_refused_by_the_layer(
    capsys: pytest.CaptureFixture[str], tp: str, dcp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(capsys, dcp, "--backend", "cuda") == (
        4,
        "",
        "error: tiny_dcp: this machine has no CUDA device\n",
    )
    code, out, err = run(capsys, tp, "--backend", "cuda", "--arch", "sm_100a")
    assert (code, out) == (4, "")
    assert err == (
        "error: tiny_tp: this version does not launch the library ops prims_ts (flashinfer), "
        "trtllm_gen (flashinfer); choose others in `variants`\n"
    )


def test_a_folder_that_was_not_generated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, str(tmp_path)) == (
        2,
        "",
        f"error: `{tmp_path}` is not a generated folder: it has no __init__.py\n",
    )


def test_help_and_a_missing_folder(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: kpipe verify ") and "--virtual-ranks N" in out
    code, out, err = run(capsys)
    assert (code, out) == (2, "")
    assert err == "error: the following arguments are required: folder; see --help\n"


def test_it_leaves_the_thread_count_alone(capsys: pytest.CaptureFixture[str], tp: str) -> None:
    before = torch.get_num_threads()
    assert run(capsys, tp, "--lengths", "5")[0] == 0
    assert torch.get_num_threads() == before


def test_it_runs_without_the_generator(dcp: str) -> None:
    """As a module in its own process, with none of the generator's libraries."""
    code = (
        "import runpy, sys\n"
        f"sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
        f"sys.argv = ['verify', {dcp!r}, '--lengths', '70,1']\n"
        "runpy.run_module('kpipe.runtime.verify', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ok: 14 comparisons, all within their bounds"
