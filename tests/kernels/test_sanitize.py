"""compute-sanitizer over single kernels: what is asked of it, and what its answers count as."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kpipe.runtime.device import barrier, wgmma
from kpipe.runtime.device.wide_stages import Stages
from kpipe.runtime.host.compile import compile_kernel, ptx_of

BENCH = Path(__file__).resolve().parents[2] / "bench"
FAKE = """#!{python}
import sys
print("=" * 9, "COMPUTE-SANITIZER")
name = sys.argv[sys.argv.index("--kernel-name") + 1]
print("asked for", name)
if name == "kns=hand_over" and sys.argv[-1] == "f":
    print("=" * 9, "RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)")
    sys.exit(1)
print("=" * 9, "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
"""


def bench(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    return bench("sanitize")


@pytest.fixture(scope="module")
def reproducer() -> ModuleType:
    return bench("racecheck_reproducer")


@pytest.fixture
def fake_tool(tmp_path, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    tool = folder / "compute-sanitizer"
    tool.write_text(FAKE.format(python=sys.executable))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_kernel_has_a_command_of_its_own(sanitize):
    options = sanitize.parsed(
        ["generated/dsa_tp", "--tool", "racecheck", "--rows", "4", "--launch-count", "1"]
        + ["--num-cuda-barriers", "64", "--racecheck-indirect-barrier-dependency"]
    )
    command = sanitize.command_of(options, "mla_query_split")
    program = command.index(sys.executable)
    assert command[:program] == [
        *("compute-sanitizer", "--tool", "racecheck", "--kernel-name", "kns=mla_query"),
        *("--launch-count", "1", "--num-cuda-barriers", "64"),
        "--racecheck-indirect-barrier-dependency",
    ]
    assert command[program + 1 :] == [
        *("-m", "kpipe.runtime.launch_check", "generated/dsa_tp"),
        *("--rows", "4", "--kernels", "mla_query_split"),
    ]


def test_every_lane_has_a_program_and_a_log_of_its_own(sanitize, fake_tool, tmp_path, capsys):
    given = ["generated/dsa_tp1", "--tool", "racecheck", "--every-lane", "--out", str(tmp_path)]
    given += ["--kernels", "sparse_decode_wide"]
    command = sanitize.command_of(sanitize.parsed(given), "sparse_decode_wide")
    program = command.index(sys.executable)
    assert command[program + 1 :] == [
        *(str(BENCH / "every_lane.py"), "generated/dsa_tp1"),
        *("--rows", "1", "--kernels", "sparse_decode_wide"),
    ]
    assert sanitize.main(given) == 0
    log = (tmp_path / "racecheck_sparse_decode_wide_every_lane.txt").read_text()
    assert " python3 bench/every_lane.py generated/dsa_tp1 --rows 1 " in log.splitlines()[0]
    assert capsys.readouterr().out.startswith("racecheck sparse_decode_wide: 0 hazards")


def test_the_reproducer_has_no_other_form(sanitize, fake_tool, capsys):
    assert sanitize.main(["reproducer", "--every-lane"]) == 2
    expected = "--every-lane: the reproducer's cases say themselves who arrives\n"
    assert capsys.readouterr().err == expected


@pytest.fixture
def every_lane(monkeypatch) -> None:
    """The change that `every_lane.py` makes, until the test ends."""
    monkeypatch.setattr(barrier, "WARP_ARRIVALS", barrier.WARP_ARRIVALS)
    monkeypatch.setattr(barrier, "arrive_as_warp", barrier.arrive_as_warp)
    monkeypatch.setattr(wgmma, "_HEAD", wgmma._HEAD)
    monkeypatch.setattr(Stages, "initialise", Stages.initialise)
    bench("every_lane").every_lane_arrives()


def test_every_barrier_of_the_wide_core_counts_lanes(every_lane, monkeypatch):
    made = {}
    monkeypatch.setattr(barrier, "make_ready", lambda at, count, lanes: made.update({at: lanes}))
    monkeypatch.setattr(barrier, "fence_ready", lambda: None)
    names = ("ready", "free", "scored", "asked", "done")
    unused = dict.fromkeys(("arena", "key_scales", "head_scales", "moves", "masses"))
    Stages(blocks=9, **unused, **{name: name for name in names}).initialise(4, 4, 8)
    assert made == {"ready": 128, "free": 256, "scored": 128, "asked": 256, "done": 384}


def test_every_lane_arrives(every_lane):
    assert barrier.arrive_as_warp is barrier.arrive
    assert "setp.ge.u32 lead, lane, 0" in wgmma._HEAD and "setp.eq.u32 lead" not in wgmma._HEAD


def test_another_text_of_the_products_is_told(monkeypatch):
    monkeypatch.setattr(wgmma, "_HEAD", "wgmma.fence.sync.aligned;")
    with pytest.raises(ValueError, match="no 'setp.eq.u32 lead, lane, 0;' in the products"):
        bench("every_lane").every_lane_arrives()
    assert barrier.WARP_ARRIVALS == 1


def test_the_dependency_is_an_option_of_racecheck_alone(sanitize):
    given = ["reproducer", "--tool", "synccheck", "--racecheck-indirect-barrier-dependency"]
    assert not any("indirect" in word for word in sanitize.command_of(sanitize.parsed(given), "a"))


@pytest.mark.parametrize(
    ("output", "code", "clean", "text"),
    [
        ("===== ERROR SUMMARY: 0 errors\n", 0, True, "0 errors"),
        ("===== ERROR SUMMARY: 3 errors\n", 1, False, "3 errors"),
        ("===== ERROR SUMMARY: 0 errors\n", 1, False, "0 errors, but exit code 1: see the log"),
        ("= RACECHECK SUMMARY: 10 hazards displayed\n", 0, False, "10 hazards displayed"),
        ("Segmentation fault\n", 139, False, "exit code 139 without a summary"),
        ("== Error: Race\n=\n== Warning: Race\n", None, False, "not end in time, 2 reports so far"),
    ],
)
def test_verdicts(sanitize, output, code, clean, text):
    verdict = sanitize.verdict_of(output, code)
    assert verdict.clean == clean and verdict.text.endswith(text)


def test_every_case_has_a_log_and_a_line(sanitize, fake_tool, tmp_path, capsys):
    given = ["reproducer", "--tool", "racecheck", "--kernels", "e,f", "--out", str(tmp_path)]
    assert sanitize.main(given) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("racecheck e: 0 hazards displayed (0 errors, 0 warnings) (")
    assert lines[1].startswith("racecheck f: 2 hazards displayed (2 errors, 0 warnings) (")
    log = (tmp_path / "racecheck_e.txt").read_text().splitlines()
    assert log[0].startswith("compute-sanitizer --tool racecheck") and log[0].endswith("--case e")
    assert "asked for kns=hand_over" in log


def test_no_tool_and_no_kernels_are_told_apart(sanitize, tmp_path, monkeypatch, capsys, request):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sanitize.main(["reproducer"]) == 4
    expected = "compute-sanitizer is not on PATH; it comes with the CUDA toolkit\n"
    assert capsys.readouterr().err == expected
    request.getfixturevalue("fake_tool")
    assert sanitize.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"{tmp_path} has no kernels\n"


def test_a_command_past_its_time_is_stopped(sanitize, tmp_path):
    forever = [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
    assert sanitize.bounded(forever, tmp_path / "log", 0.01) is None
    assert sanitize.bounded([sys.executable, "-c", "exit(3)"], tmp_path / "log", 60) == 3


HAND_OVERS = {
    "a": ("cp.async.cg", "cp.async.mbarrier.arrive.noinc", "try_wait"),
    "b": (
        "cp.async.cg",
        "cp.async.mbarrier.arrive.noinc",
        "try_wait",
        "bar.warp.sync",
        "mbarrier.arrive.shared",
    ),
    "c": ("cp.async.bulk", "expect_tx", "try_wait"),
    "d": ("st.shared", "bar.warp.sync", "mbarrier.arrive.shared", "try_wait"),
    "e": ("st.shared", "mbarrier.arrive.shared", "try_wait"),
    "f": ("st.shared", "mbarrier.arrive.shared"),
    "g": ("st.shared", "mbarrier.arrive.shared", "try_wait"),
    "h": ("cp.async.bulk", "expect_tx", "try_wait"),
    "i": ("cp.async.bulk", "expect_tx", "try_wait", "bar.warp.sync", "mbarrier.arrive.shared"),
    "j": (
        "cp.async.cg",
        "cp.async.mbarrier.arrive.noinc",
        "try_wait",
        "bar.warp.sync",
        "mbarrier.arrive.shared",
    ),
}
WORDS = sorted({word for words in HAND_OVERS.values() for word in words})


def test_cases_have_one_list_of_names(sanitize, reproducer):
    assert list(sanitize.CASES) == list(reproducer.CASES) == list(HAND_OVERS)


@pytest.mark.parametrize("case", HAND_OVERS)
def test_a_case_holds_its_hand_over_and_no_other(reproducer, case):
    kernel = reproducer.CASES[case]()
    ptx = ptx_of(compile_kernel(kernel, reproducer.operands(), "sm_90a", keep_ptx=True))
    assert [word for word in WORDS if word in ptx] == sorted(HAND_OVERS[case])
