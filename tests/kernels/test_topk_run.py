"""The exact top-k run on the CPU from its PTX: clusters of CTAs, stores that land late."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from kernel_files import GEOMETRIES, context, load
from ptx_machine import Launch, packed, parse, run
from torch import Tensor

from kpipe.codegen.render.api import environment
from kpipe.runtime.host.compile import compile_kernel, ptx_of
from kpipe.runtime.launch_cases import select, small


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    for module in (select, small):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> ModuleType:
    return module_of(tmp_path_factory.mktemp("topk"))


def module_of(folder: Path, *edit: str) -> ModuleType:
    """The generated file, its only occurrence of a text replaced."""
    template = environment(()).get_template("kernels/topk_select.py.jinja")
    text = template.render(context(GEOMETRIES["small"]))
    assert not edit or text.count(edit[0]) == 1
    (folder / "topk_select.py").write_text(text.replace(*edit) if edit else text)
    return load(folder / "topk_select.py")


def wrong_of(module: ModuleType, given: dict[str, Tensor], q: int = 1, **flags) -> list[str]:
    """What the judge of GPU runs says of a launch."""
    case = select.TopkSelectCase(module)
    live = {n: t.clone() if n in case.outputs else t for n, t in given.items()}
    kernel = module.TopkSelect(**flags)
    specs = module.operands()
    program = parse(ptx_of(compile_kernel(kernel, specs, "sm_90a", keep_ptx=True)))
    rows = live["scores"].shape[0]
    tensors = [live[spec.name] for spec in specs]
    run([Launch(program, (kernel.parts, rows, 1), parameters(live), tensors, kernel.parts)])
    return case.check(given, live, q, flags.get("tie", "low_id")).wrong


def parameters(live: dict[str, Tensor]) -> list[bytes]:
    """Of the kernel: addresses, sizes known at the launch, rows of a block of the cache."""
    table = live["block_table"]
    rows = live["scores"].shape[0]
    given = [
        (live["scores"], [rows]),
        (live["lengths"], list(live["lengths"].shape)),
        (table, [*table.shape, table.stride(0)]),
        (live["selected"], [rows]),
        (live["valid"], [rows]),
    ]
    sizes = packed(given)
    cache = live["latent_kv"]
    block_rows = cache.stride(0) // cache.shape[2]
    return [*sizes[:3], int(block_rows).to_bytes(4, "little"), *sizes[3:]]


def given_of(module: ModuleType, lengths: list[int], q: int = 1) -> dict[str, Tensor]:
    """Inputs of requests of those lengths, every kind of score in turn."""
    case = select.TopkSelectCase(module)
    given = case.inputs(len(lengths) * q, q, module.CONTEXT)
    seen = [max(length - q + 1 + i, 0) for length in lengths for i in range(q)]
    scores = select.random_scores(seen, module.CONTEXT)
    return {**given, "scores": scores, "lengths": torch.tensor(lengths, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("flags", "lengths", "q"),
    [
        ({"parts": 1, "threads": 128}, (17, 1152), 1),
        ({"parts": 2, "threads": 128}, (100, 1152), 1),
        ({"parts": 4, "threads": 128, "tie": "high_id"}, (1152,), 2),
        ({"parts": 8, "threads": 128}, (0, 1152), 1),
    ],
)
def test_a_launch_is_right(module, flags, lengths, q):
    assert wrong_of(module, given_of(module, list(lengths), q), q, **flags) == []


def test_a_score_beyond_the_bins_is_found_by_its_rank(module):
    """Nothing but scores that FP16 takes for one: histograms of ranks narrow them down."""
    given = given_of(module, [1152])
    scores = 70000 + torch.randperm(1152).float()
    assert wrong_of(module, {**given, "scores": scores[None]}, parts=2, threads=128) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ahead < need", "ahead <= need"),
        ("        barrier.wait_for_peers(shared.arrived, 0)\n", ""),
        ("        copy_async.wait()  # the blocks\n", ""),
    ],
)
def test_a_wrong_kernel_is_found(tmp_path, old, new):
    broken = module_of(tmp_path, old, new)
    given = given_of(broken, [1152])
    scores = given["scores"]
    scores[:, 400:700] = scores[:, 1030:1100] = 9.0  # ties in both parts, more than top_k
    scores[:, 100:103] = scores[:, 1145:1150] = 10.0
    try:
        wrong = wrong_of(broken, given, parts=2, threads=128)
    except AssertionError as error:
        wrong = [str(error)]
    assert wrong and re.search("row 0 of 1152 keys|what peers have stored|st.global", wrong[0])
