"""Kernels that publish, wait, merge and reduce: what they touch by which accesses, and when."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_files import ARCHS, GEOMETRIES, context, load
from ptx_flow import RELEASE, WAIT, global_accesses

from kpipe.codegen.ops.contract import Release
from kpipe.codegen.ops.registry import CONTRACTS
from kpipe.codegen.render.api import environment
from kpipe.runtime.comm.sanitise import clear_negative_zero, every_pattern
from kpipe.runtime.device import mailbox
from kpipe.runtime.host.compile import compile_kernel, ptx_of
from kpipe.runtime.host.kernel_file import operands_of

SYSTEM = ".relaxed.sys.global"
RANKS = 8
# Kernel, flags, whether it sends, whether it polls.
FORMS = [
    ("mla_query", {}, True, False),
    ("mla_query", {"writes_q_c": True}, True, False),
    ("mla_query", {"polls": True}, True, True),
    ("mla_query", {"polls": True, "half": "publish"}, True, False),
    ("mla_query", {"polls": True, "half": "collect"}, False, True),
    ("mla_query_split", {}, True, False),
    ("query_wait", {}, False, True),
    ("topk_local", {}, True, False),
    ("topk_merge", {}, False, True),
    ("dcp_value", {}, False, True),
    ("dcp_value", {"pushes": True}, True, True),
    ("dcp_value", {"pushes": True, "half": "publish"}, True, False),
    ("dcp_value", {"pushes": True, "half": "collect"}, False, True),
    ("dcp_value_projected", {}, True, True),
    ("dcp_value_projected", {"half": "publish"}, True, False),
    ("dcp_value_projected", {"half": "collect"}, False, True),
    ("o_proj", {}, True, False),
    ("o_proj", {"two_shot": True}, True, False),
    ("o_reduce", {}, False, True),
    ("o_reduce", {"add_prefix": True}, False, True),
    ("o_reduce", {"mix_blocks": True}, False, True),
    ("o_reduce", {"add_prefix": True, "mix_blocks": True, "round_mix": "bf16"}, False, True),
    ("o_reduce", {"two_shot": True}, True, True),
    ("o_reduce", {"two_shot": True, "add_prefix": True}, True, True),
    ("o_reduce", {"two_shot": True, "add_prefix": True, "mix_blocks": True}, True, True),
    ("o_reduce", {"two_shot": True, "mix_blocks": True, "half": "publish"}, True, True),
    ("o_reduce", {"two_shot": True, "mix_blocks": True, "half": "collect"}, False, True),
    ("o_reduce", {"two_shot": True, "half": "publish"}, True, True),
    ("o_reduce", {"two_shot": True, "half": "collect"}, False, True),
]
NAMES = tuple(dict.fromkeys(name for name, *_ in FORMS))
MAILBOXES = {"q_mail", "candidates", "partial_mail", "lse_mail", "o_mail", "o_gather"}
REARMS = {"topk_merge", "dcp_value", "dcp_value_projected", "o_reduce"}


def rendered(folder: Path, geometry: str, **options) -> None:
    for name in NAMES:
        template = environment(()).get_template(f"kernels/{name}.py.jinja")
        text = template.render(context(GEOMETRIES[geometry], ranks=RANKS, **options))
        (folder / f"{name}.py").write_text(text)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """geometry -> folder with the rendered kernels."""
    made = {geometry: tmp_path_factory.mktemp(f"mail_{geometry}") for geometry in GEOMETRIES}
    for geometry, folder in made.items():
        rendered(folder, geometry)
    return made


@pytest.fixture(scope="module")
def modules(folders) -> dict[tuple[str, str], ModuleType]:
    return {(g, name): load(folders[g] / f"{name}.py") for g in GEOMETRIES for name in NAMES}


def kernel_of(module: ModuleType, name: str, **flags):
    return getattr(module, "".join(part.capitalize() for part in name.split("_")))(**flags)


def build(module: ModuleType, name: str, arch: str = "sm_90a", **flags) -> str:
    kernel = kernel_of(module, name, **flags)
    return ptx_of(compile_kernel(kernel, operands_of(module, kernel), arch, keep_ptx=True))


def label(form: tuple) -> str:
    return "-".join([form[0], *(f"{k}_{v}" for k, v in form[1].items())])


# Every form in each geometry and for each target, and for both in the shipped geometry where it
# has no flags: test_generated.py compiles that as well.
PLACES = [
    *itertools.product(["kimi"], FORMS, ARCHS[:1]),
    *itertools.product(["small"], FORMS, ARCHS[1:]),
    *itertools.product(["kimi"], [form for form in FORMS if not form[1]], ARCHS[1:]),
]


@pytest.mark.parametrize(
    ("geometry", "form", "arch"), PLACES, ids=lambda x: x if isinstance(x, str) else label(x)
)
def test_words_travel_by_accesses_of_system_scope(modules, geometry, form, arch):
    name, flags, sends, polls = form
    module = modules[geometry, name]
    ptx = build(module, name, arch, **flags)
    assert f".target {arch}" in ptx and ".local" not in ptx
    assert (f"ld{SYSTEM}" in ptx) == polls
    assert (f"st{SYSTEM}" in ptx) == (sends or polls)  # a time-out is recorded
    assert ("trap;" in ptx) == polls
    names = [spec.name for spec in operands_of(module, kernel_of(module, name, **flags)) if spec]
    assert polls == ("fault" in names)
    assert sends == any(operand.endswith("_peers") for operand in names)
    for access in global_accesses(ptx):
        # The tables are known before the step; all words lie behind the wait.
        assert access.waited or SYSTEM not in access.text, access.text


@pytest.mark.parametrize("form", FORMS, ids=label)
def test_no_plain_access_touches_a_mailbox(modules, form):
    name, flags, _, _ = form
    if flags.get("half") == "collect" and name == "mla_query":
        return  # another kernel of the file, with parameters of its own
    module = modules["kimi", name]
    operands = [s.name for s in operands_of(module, kernel_of(module, name, **flags)) if s]
    if name == "o_proj":
        operands = ["gated", "gated rows", "o_proj", "rows", "o_mail_peers"]
    for access in global_accesses(build(module, name, **flags)):
        touched = {operands[number] for number in access.parameters if number < len(operands)}
        plain = SYSTEM not in access.text
        assert not (plain and touched & MAILBOXES), access.text


@pytest.mark.parametrize("name", NAMES)
def test_waits_and_releases_as_the_contract_says(modules, name):
    module, contract = modules["kimi", name], CONTRACTS[name]
    ptx = build(module, name)
    assert (WAIT in ptx) == contract.waits
    assert (RELEASE in ptx) == (contract.release is not Release.NEVER)
    if contract.release is not Release.NEVER:
        assert RELEASE not in build(module, name, release=False)


@pytest.mark.parametrize("name", sorted(REARMS))
def test_what_is_read_is_re_armed(modules, name):
    module = modules["kimi", name]
    store = rf"st{SYSTEM}\.v4\.b32 \[%rd\d+\], {{(%r\d+), \1, \1, \1}};"
    assert re.search(store, build(module, name)), "no fragment gets its sentinel back"


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rendered_files_are_clean(folders, geometry):
    files = sorted(str(path) for path in folders[geometry].glob("*.py"))
    ruff = [sys.executable, "-m", "ruff"]
    style = ["--isolated", "--line-length", "100"]
    rules = ["--select", "E,F,I,B,UP", "--config", 'lint.isort.known-first-party=["kpipe"]']
    for command in (["format", "--check", *style], ["check", *style, *rules]):
        done = subprocess.run([*ruff, *command, *files], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_query_of_two_bytes_is_sent(tmp_path):
    rendered(tmp_path, "kimi", cache_format="fp8_ds_mla")
    senders = ("mla_query", "mla_query_split", "dcp_value", "dcp_value_projected")
    for name in (*senders, "query_wait"):
        module = load(tmp_path / f"{name}.py")
        specs = {s.name: s for s in operands_of(module, kernel_of(module, name)) if s}
        assert specs.get("q_mail") is None or specs["q_mail"].dtype == "bf16"
        assert SYSTEM in build(module, name)


class Word(int):
    """A 32-bit word with the operators of the device's."""

    def __and__(self, other: int) -> Word:
        return Word(int(self) & int(other))

    def __or__(self, other: int) -> Word:
        return Word(int(self) | int(other))

    def __add__(self, other: int) -> Word:
        return Word((int(self) + int(other)) & 0xFFFFFFFF)


def test_no_pair_of_halves_is_the_sentinel(monkeypatch):
    """All 65536 halves, in either place, beside every kind of neighbour."""
    monkeypatch.setattr(mailbox, "Uint32", Word)
    patterns = every_pattern(torch.bfloat16)
    wanted = clear_negative_zero(patterns).view(torch.int16).tolist()
    wanted = [half & 0xFFFF for half in wanted]
    neighbours = (0x0000, 0x8000, 0x0001, 0x8001, 0x7FFF, 0xFFFF, 0x7F80, 0xFF80)
    for half, other in itertools.product(range(1 << 16), neighbours):
        for low, high in ((half, other), (other, half)):
            cleared = mailbox.clear_negative_zero(Word(low | high << 16))
            assert cleared == wanted[low] | wanted[high] << 16
            assert cleared != mailbox.NEGATIVE_ZERO


def test_no_code_of_a_conversion_is_the_sentinel(modules):
    """Every value that E4M3 has is kept by a saturating conversion, a NaN becomes 0x7F."""
    codes = every_pattern(torch.float8_e4m3fn)
    made = set(codes.float().to(torch.float8_e4m3fn).view(torch.uint8).tolist())
    finite = codes[~codes.float().isnan()].view(torch.uint8).tolist()
    assert set(finite) | {0x7F} == set(range(256)) - {0xFF} and set(finite) <= made
    ptx = build(modules["kimi", "mla_query"], "mla_query")
    conversions = [line for line in ptx.splitlines() if "e4m3" in line]
    assert conversions and all("cvt.rn.satfinite.e4m3x2.f32" in line for line in conversions)


def test_flags_are_checked(modules):
    wrong = [
        ("mla_query", {"half": "both"}, "half is 'both'; choose whole, publish or collect"),
        ("dcp_value", {"half": "both"}, "half is 'both'; choose from whole, publish, collect"),
        ("dcp_value", {"lse_base": "10"}, "lse_base is '10'; choose 2 or e"),
        ("dcp_value", {"sigmoid": "soft"}, "unknown sigmoid 'soft'"),
        ("dcp_value_projected", {"half": "both"}, "half is 'both'; choose from whole, publish"),
        ("dcp_value_projected", {"lse_base": "10"}, "lse_base is '10'; choose 2 or e"),
        ("dcp_value_projected", {"sigmoid": "soft"}, "unknown sigmoid 'soft'"),
        ("o_reduce", {"half": "both"}, "half is 'both'; choose from whole, publish, collect"),
        ("o_reduce", {"rank": 8}, r"rank 8 is outside 0\.\.7"),
        ("o_reduce", {"round_mix": "fp16"}, "round_mix is 'fp16'; choose from fp32, bf16"),
        ("topk_merge", {"tie": "first"}, "tie is 'first'; choose from low_id, high_id"),
        ("topk_merge", {"rank": 8}, r"rank 8 is outside 0\.\.7"),
        ("topk_local", {"interleave": 0}, "interleave 0 must be at least 1"),
    ]
    for name, flags, text in wrong:
        with pytest.raises(ValueError, match=text):
            kernel_of(modules["kimi", name], name, **flags)


def test_what_has_to_run_at_once_is_known(modules):
    """A cluster that waits and one that sends; a CTA a head, of this rank or of all; whatever
    there is."""
    needed = {"mla_query": 16, "dcp_value": 12, "dcp_value_projected": 96, "o_reduce": 1}
    for name, ctas in needed.items():
        kernel = kernel_of(modules["kimi", name], name)
        assert kernel.resident_ctas(64) == ctas
    mixed = kernel_of(modules["kimi", "o_reduce"], "o_reduce", mix_blocks=True)
    assert mixed.resident_ctas(64) == mixed.parts == 7


@pytest.mark.parametrize("rounds", [False, True])
def test_a_mixed_row_costs_one_exchange_of_its_cluster(modules, rounds):
    """A barrier ahead of the rows, one behind the dots, one behind a rounded mixture's square."""
    flags = {"mix_blocks": True, "round_mix": "bf16" if rounds else "fp32"}
    ptx = build(modules["kimi", "o_reduce"], "o_reduce", **flags)
    assert ptx.count("barrier.cluster.wait") == 2 + rounds
    assert ptx.count("mapa.shared::cluster") == 7 * (1 + rounds)
    assert "barrier.cluster" not in build(modules["small", "o_reduce"], "o_reduce", **flags)
