"""Whole layers whose library ops run through their adapters, on the library that stands in."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from fake_flash_mla import Library
from layer_checks import assert_within_bounds, lengths
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime.layer import Layer
from kpipe.runtime.library.catalogue import ADAPTERS, LibraryOp, refusals
from kpipe.runtime.library.site import Site, site_of
from kpipe.runtime.library.value_bmm import ValueBmm
from kpipe.runtime.memory import Scratch
from kpipe.runtime.metadata import LayerError
from kpipe.runtime.op import Op
from kpipe.runtime.reference import value
from kpipe.runtime.trial import Case, run_case

SMALL = "geometry: small\nparallel: {tp: 4}\n"


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> LayerFactory:
    return LayerFactory(tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module")
def flashmla(factory: LayerFactory) -> type[Layer]:
    """dsa_tp_flashmla in small: FlashMLA's core everywhere, a value GEMM beyond 32 rows."""
    text = f"extends: dsa_tp_flashmla.yaml\nname: flashmla_small\n{SMALL}"
    return factory.layer("flashmla_small", text)


def with_adapters(base: type[Layer]) -> type[Layer]:
    """The layer with every library op launched by its adapter, as the cuda backend does."""

    class Adapted(base):  # type: ignore[misc, valid-type]
        def prepare(self, *records: Any, scratch: Scratch, **options: Any) -> None:
            super().prepare(*records, scratch=scratch, **options)
            for op in self.OPS:
                if op.name in ADAPTERS:
                    place, calls = site_of(self, scratch), self.calls()
                    run = LibraryOp(op, self._bound(op), place, calls, self._enter)
                    setattr(self, op.name, run)

    return Adapted


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("rows", "q"), [(3, 1), (16, 1), (64, 1), (64, 4)])
def test_every_stage_is_within_its_bound(
    flashmla: type[Layer], monkeypatch: pytest.MonkeyPatch, rows: int, q: int, arch: str
) -> None:
    library = Library()
    monkeypatch.setitem(sys.modules, "flash_mla", library.module())
    case = Case(
        lengths(rows // q, first=rows), q=q, arch=arch, seed=rows, layers=2, only_ranks=(1,)
    )
    trials = run_case(with_adapters(flashmla), case)
    stages = {(error.stage, error.what) for error in assert_within_bounds(trials)}
    assert {("sparse_core", "latent"), ("value", "gated"), ("o_proj", "out")} <= stages
    first, second = (trial.ranks[0] for trial in trials)
    launched = {op.op.name for op in vars(second.layer).values() if isinstance(op, LibraryOp)}
    assert launched == {"flashmla_sparse", "value_bmm"}
    assert not first.out.equal(second.out)
    declared = {
        size for (name, _), sizes in flashmla.TABLE.items() if name == arch for size in sizes
    }
    assert len(library.schedules) == 2 * len(declared), "one for each layer and number of rows"


def test_a_core_of_one_architecture_only(factory: LayerFactory) -> None:
    """`core: {sm_90a: flashmla_sparse}` beside our own core: planned, proved, generated, run."""
    text = (
        f"extends: dsa_tp_ds.yaml\nname: hopper_flashmla\n{SMALL}stages:\n  sparse_core:\n"
        "    ops: [core]\n    variants: {core: {sm_90a: flashmla_sparse, sm_100a: sparse_decode}}\n"
    )
    layer_class = factory.layer("hopper_flashmla", text)
    for arch, core in (("sm_90a", "flashmla_sparse"), ("sm_100a", "sparse_decode")):
        (trial,) = run_case(layer_class, Case((70, 0, 16), arch=arch))
        assert_within_bounds([trial])
        layer = layer_class()
        layer.arch = arch
        cores = {call.op for call in layer.calls()} & {"flashmla_sparse", "sparse_decode"}
        assert cores == {core}


def test_a_layer_without_the_package_is_refused(flashmla: type[Layer]) -> None:
    with pytest.raises(LayerError) as caught:
        engine_inputs(flashmla, (3,)).prepared(flashmla, backend="cuda", arch="sm_90a")
    assert str(caught.value) == (
        "flashmla_small: flashmla_sparse needs the package `flash_mla`, which is not installed: "
        "pip install sgl-flash-mla, or choose `core: sparse_decode`"
    )


def test_a_library_that_nobody_calls_yet_is_refused_by_name() -> None:
    ops = [
        Op("value_bmm", "value", value.value_bmm, source="torch"),
        Op("trtllm_gen", "sparse_core", value.value_bmm, source="flashinfer"),
        Op("mla_value", "value", value.mla_value, kernel="mla_value:MlaValue"),
    ]
    assert refusals(ops) == [
        "this version does not launch the library ops trtllm_gen (flashinfer); choose others in "
        "`variants`"
    ]


def test_a_library_takes_no_launch_attribute(flashmla: type[Layer]) -> None:
    op = next(op for op in flashmla.OPS if op.name == "value_bmm")
    entered: list[str] = []
    run = LibraryOp(op, {}, Site("x", 1, 1, None, None), (), lambda op: entered.append(op.name))
    with pytest.raises(LayerError, match="^value_bmm cannot be launched with the PDL attribute$"):
        run(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), pdl=True)
    assert entered == []


@pytest.mark.parametrize(("rows", "cap"), [(1, 1), (5, 8), (64, 64)])
def test_the_value_gemm_fills_its_rows_and_no_other(rows: int, cap: int) -> None:
    """Against float64; the values lie in a buffer of more rows, whose rest stays as it was."""
    generator = torch.Generator().manual_seed(rows)
    latent, w_uv = (
        torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, 3, 64), (3, 32, 64))
    )
    buffer = torch.full((3, cap, 32), torch.nan).bfloat16()
    ValueBmm(None)(latent, buffer[:, :rows], w_uv=w_uv)
    expected = torch.einsum("rhl,hvl->hrv", latent.double(), w_uv.double())
    torch.testing.assert_close(buffer[:, :rows].double(), expected, rtol=2**-8, atol=1e-4)
    assert buffer[:, rows:].isnan().all()
