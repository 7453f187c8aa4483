"""Latent pages of 2048 tokens: the kernels that touch the latent cache compile for them."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import pytest
from kernel_files import (
    ARCHS,
    KIMI,
    STEP_READS,
    WEIGHTS,
    assert_waits,
    build,
    context,
    load,
    names_of,
)
from ptx_flow import parameter_registers

from kpipe.codegen.render.api import environment
from kpipe.runtime.formats import cache_format as layout

PAGE = 2048
TOUCHING = ("mla_query", "mla_query_split", "sparse_decode", "topk_select")
FORMS = tuple(itertools.product(("fp8_tensor", "fp8_ds_mla"), TOUCHING))
# Every pair of cache format, kernel and target: the two formats of a kernel take turns.
PLACES = tuple(
    (form, name, ARCHS[(place + (form == "fp8_ds_mla")) % 2])
    for form, (place, name) in itertools.product(("fp8_tensor", "fp8_ds_mla"), enumerate(TOUCHING))
)


@pytest.fixture(scope="module")
def paged(tmp_path_factory) -> dict[tuple[str, str], ModuleType]:
    """(cache format, kernel) -> its module for pages of 2048."""
    templates, made = environment(()), {}
    for form, name in FORMS:
        folder: Path = tmp_path_factory.mktemp(form)
        given = context(KIMI, form)
        given["pages"]["latent_kv"] = PAGE
        text = templates.get_template(f"kernels/{name}.py.jinja").render(given)
        (folder / f"{name}.py").write_text(text)
        made[form, name] = load(folder / f"{name}.py")
    return made


@pytest.mark.parametrize(("form", "name", "arch"), PLACES)
def test_large_pages_compile_and_wait(paged, form, name, arch):
    module = paged[form, name]
    (cache,) = (spec for spec in module.operands() if spec and spec.name == "latent_kv")
    row_bytes = layout(form, kv_lora=512, pe=64).row_bytes
    assert cache.shape[1:] == (PAGE, row_bytes) and module.PAGE == PAGE
    ptx = build(module, name, arch)
    scales = {"q_scale", "k_scale"} if form == "fp8_ds_mla" and name == "sparse_decode" else set()
    step_reads = STEP_READS.get(name, ())
    assert_waits(ptx, names_of(module.operands()), WEIGHTS[name] - scales, step_reads)


@pytest.mark.parametrize("form", ["fp8_tensor", "fp8_ds_mla"])
def test_a_slot_of_a_large_page_is_64_bit(paged, form):
    """2048 rows of 656 bytes: 1600 pages pass 2^31."""
    module = paged[form, "mla_query"]
    ptx = build(module, "mla_query", "sm_90a")
    number = names_of(module.operands()).index("latent_kv")
    (stride,) = parameter_registers(ptx, number, 16)
    products = [line for line in ptx.splitlines() if stride in line and "ld.param" not in line]
    assert products and all(".lo.s64" in line for line in products), products
    assert "shr.s64" in ptx or "shr.u64" in ptx, "slots are divided by a power of two"
