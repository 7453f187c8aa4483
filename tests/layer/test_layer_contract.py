"""What prepare() and run() refuse, and what padding, stopping and shared scratch guarantee."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import engine_inputs, with_empty_requests

from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError, Step, given
from kpipe.runtime.prepared import poison
from kpipe.runtime.trial import Case, run_case


def _refused(error: type[Exception], text: str, call: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(error) as caught:
        call(*arguments, **named)
    assert str(caught.value) == text


# -- prepare ------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_listed_together(layers: LayerFactory) -> None:
    layer = layers.tp(4)
    ready = engine_inputs(layer, (3,))
    ready.weights.q_norm = None
    ready.weights.w_uk = ready.weights.w_uk.transpose(1, 2)
    ready.weights.o_proj = ready.weights.o_proj.float()
    ready.weights.q_scale = None
    _refused(
        LayerError,
        "tp_4 weights: o_proj is [256, 128] fp32, not [256, 128] bf16; "
        "q_norm is missing: [128] bf16; "
        "q_scale is missing: [1] fp32; "
        "w_uk is [4, 128, 32] bf16, not [4, 32, 128] bf16",
        ready.prepared,
        layer,
    )


def test_caches_that_do_not_fit(layers: LayerFactory) -> None:
    layer = layers.tp(4)
    ready = engine_inputs(layer, (3,))
    narrow = replace(ready.caches, latent_kv=ready.caches.latent_kv[:, :32])
    _refused(
        LayerError,
        f"tp_4 caches: latent_kv is [{narrow.latent_kv.shape[0]}, 32, 144], "
        "not [blocks, 64, row bytes]",
        replace(ready, caches=narrow).prepared,
        layer,
    )
    missing = replace(ready.caches, index_kv=None)
    with pytest.raises(LayerError, match=r"^tp_4 caches: missing index_kv$"):
        replace(ready, caches=missing).prepared(layer)
    other = replace(ready.caches, latent_kv=ready.caches.latent_kv[:, :, :-4].contiguous())
    with pytest.raises(
        ValueError, match=r"^latent_kv: rows of 140 bytes, format fp8_tensor needs 144$"
    ):
        replace(ready, caches=other).prepared(layer)


def test_arch_backend_and_group(layers: LayerFactory) -> None:
    layer = layers.dcp(2)
    ready = engine_inputs(layer, (3,))
    _refused(
        LayerError,
        "dcp_2_i1: no plan for sm_120a; generated for sm_90a, sm_100a",
        ready.prepared,
        layer,
        arch="sm_120a",
    )
    _refused(
        LayerError,
        "dcp_2_i1: backend 'cpu' is not one of reference, cuda",
        ready.prepared,
        layer,
        backend="cpu",
    )
    _refused(
        LayerError,
        "dcp_2_i1 runs on 2 ranks: prepare() needs `comm`, for example VirtualRanks(2).rank(0), "
        "or HostProcesses(Processes.join()).comm where each rank is a process",
        ready.prepared,
        layer,
    )
    _refused(
        LayerError,
        "dcp_2_i1 is generated for 2 ranks, the group has 4",
        ready.prepared,
        layer,
        comm=VirtualRanks(4).rank(0),
    )


def test_a_tensor_parallel_layer_takes_its_place_in_a_group(layers: LayerFactory) -> None:
    """It exchanges nothing, so that its contexts are whole on every rank."""
    layer_class = layers.tp(4)
    ready = engine_inputs(layer_class, (70, 5), rank=3)
    ready.prepared(layer_class, comm=VirtualRanks(4).rank(3)).run(ready.step)
    alone = engine_inputs(layer_class, (70, 5), rank=3)
    alone.prepared(layer_class).run(alone.step)
    assert ready.step.out.equal(alone.step.out)


def test_the_cuda_backend_names_the_ops_without_a_kernel(layers: LayerFactory) -> None:
    shipped = layers.dcp(2)
    launched = {call.op for call in shipped().calls("sm_90a")}
    missing = [op.name for op in shipped.OPS if op.source == "kpipe" and op.name in launched][:2]

    class layer(shipped):  # every op that is shipped has one
        OPS = tuple(
            replace(op, kernel="") if op.name in missing or op.name not in launched else op
            for op in shipped.OPS
        )

    _refused(
        LayerError,
        f"dcp_2_i1: these ops have no CUDA kernel yet: {missing[0]}, {missing[1]}; use "
        'backend="reference"',
        engine_inputs(layer, (3,)).prepared,
        layer,
        backend="cuda",
        arch="sm_90a",
    )


def test_the_cuda_backend_names_the_libraries_that_it_does_not_call(layers: LayerFactory) -> None:
    layer = layers.tp(4)
    assert all(op.kernel for op in layer.OPS if op.source == "kpipe"), "only libraries are missing"
    _refused(
        LayerError,
        "tp_4: this version does not launch the library ops prims_ts (flashinfer), trtllm_gen "
        "(flashinfer); choose others in `variants`",
        engine_inputs(layer, (3,)).prepared,
        layer,
        backend="cuda",
        arch="sm_100a",
    )


def test_the_cuda_backend_wants_its_weights_on_a_device(layers: LayerFactory) -> None:
    layer = layers.tp(4)
    _refused(
        LayerError,
        "tp_4: the weights lie on cpu, and the cuda backend runs where they are; move them to a "
        "CUDA device",
        engine_inputs(layer, (3,)).prepared,
        layer,
        backend="cuda",
        arch="sm_90a",
    )


@pytest.mark.parametrize(
    ("scale", "text"),
    [(0.0, "0.0"), (-1.0, "-1.0"), (float("nan"), "nan"), (float("inf"), "inf")],
)
@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
def test_scales_that_cannot_be(layers: LayerFactory, name: str, scale: float, text: str) -> None:
    layer = layers.tp(4)
    ready = engine_inputs(layer, (3,))
    setattr(ready.weights, name, torch.tensor([scale]))
    _refused(
        ValueError,
        f"SP-SCALE-VALUE: {name} is {text}; a scale is finite and above 0",
        ready.prepared,
        layer,
    )


def test_the_latent_has_one_scale(layers: LayerFactory) -> None:
    layer = layers.tp(4)
    ready = engine_inputs(layer, (3,))
    ready.weights.k_scale = ready.weights.v_scale = torch.tensor([0.5])
    ready.prepared(layer)
    ready.weights.v_scale = torch.tensor([0.25])
    _refused(
        ValueError,
        "SP-MLA-SCALE: MLA latent has one scale; k_scale 0.5 != v_scale 0.25",
        ready.prepared,
        layer,
    )


# -- run ----------------------------------------------------------------------------------------


def test_steps_that_were_not_declared(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    ready = engine_inputs(layer_class, (3,) * 65)
    layer = ready.prepared(layer_class)
    _refused(LayerError, "tp_4: 65 rows; declared for q 1 are 1 to 64", layer.run, ready.step)
    _refused(
        LayerError,
        "tp_4: q 2 is not declared; declared: 1, 4",
        layer.run,
        engine_inputs(layer_class, (3, 3), q=2).step,
    )
    none = replace(ready.step, hidden=ready.step.hidden[:0])
    _refused(LayerError, "tp_4: 0 rows; declared for q 1 are 1 to 64", layer.run, none)


def test_tensors_of_other_rows_are_listed_together(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    ready = engine_inputs(layer_class, (3, 9))
    layer = ready.prepared(layer_class)
    step = replace(
        ready.step,
        out=ready.step.out[:1],
        slots=ready.step.slots.int(),
        index_table=None,
        index_slots=ready.step.index_slots[:1],
    )
    with pytest.raises(LayerError) as caught:
        layer.run(step)
    what, problems = str(caught.value).split(": ", 1)
    assert what == "tp_4 step"
    assert sorted(problems.split("; ")) == [
        "index_slots is [1] i64, not [2] i64",
        "index_table is missing: [2, index_pages] i32",
        "out is [1, 256] bf16, not [2, 256] bf16",
        "slots is [2] i32, not [2] i64",
    ]


def test_rows_must_belong_to_requests(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    ready = engine_inputs(layer_class, (3, 9), q=4)
    layer = ready.prepared(layer_class)
    step = replace(ready.step, lengths=ready.step.lengths[:1])
    _refused(
        ValueError,
        "KP-ROWS: q has 8 rows, seq_lens has 1, block_table has 2; "
        "stage tp_4 is declared 4 rows per request",
        layer.run,
        step,
    )


def test_an_unknown_stage_lists_the_stages(layers: LayerFactory) -> None:
    ready = engine_inputs(layers.tp(4), (3, 9))
    layer = ready.prepared(layers.tp(4))
    _refused(
        LayerError,
        "tp_4: no stage 'softmax'; stages: projection, indexer, query, sparse_core, value, o_proj",
        layer.run,
        ready.step,
        stop_after="softmax",
    )


def test_run_names_the_method_that_its_table_holds(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    for arch in ("sm_90a", "sm_100a"):
        for rows, declared in ((1, 1), (9, 16), (33, 64)):
            ready = engine_inputs(layer_class, (3,) * rows)
            layer = ready.prepared(layer_class, arch=arch)
            assert layer.run(ready.step) == layer_class.TABLE[(arch, 1)][declared]


# -- padding ------------------------------------------------------------------------------------


def _spoiled_padding(layer_class: type[Layer]) -> type[Layer]:
    """The same layer, in which the rows that padding adds hold NaN instead of zeros."""

    class Spoiled(layer_class):  # type: ignore[misc, valid-type]
        def _padded(self, step: Step, size: int) -> Step:
            padded = super()._padded(step, size)
            padded.hidden[step.rows :] = torch.nan
            return padded

    return Spoiled


# Rows 9 become 16.  The modes and cores of 16 rows take what 5 to 8 rows take on sm_90a.
@pytest.mark.parametrize("contexts", [(70, 1, 64, 129, 33, 0, 5, 16, 17), (5,) + (0,) * 8])
@pytest.mark.parametrize("parallel", ["tp", "dcp"])
def test_padding_rows_change_nothing(
    layers: LayerFactory, contexts: tuple[int, ...], parallel: str
) -> None:
    """Rows 9 padded to 16, padding full of NaN, against the same requests padded by hand."""
    layer = layers.tp(2) if parallel == "tp" else layers.dcp(2)
    (padded,) = run_case(_spoiled_padding(layer), Case(contexts))
    (clean,) = run_case(layer, Case(contexts))
    for spoiled, run in zip(padded.ranks, clean.ranks, strict=True):
        assert spoiled.views.rows == 16 and spoiled.out.shape[0] == 9
        assert spoiled.out.equal(run.out) and bool(run.out.isfinite().all())
        assert bool((spoiled.views.gated[9:] == 0).all())
        assert bool((spoiled.views.valid[9:] == 0).all())
        assert bool((spoiled.views.selected[9:] == -1).all())
        assert spoiled.latent.data.equal(run.latent.data)
        assert spoiled.index.data.equal(run.index.data)


@pytest.mark.parametrize("extra", [0, 3])
def test_five_rows_equal_the_first_of_eight(layers: LayerFactory, extra: int) -> None:
    """Empty requests in the caller's own padding, their hidden rows NaN: the same bits."""
    layer_class, real = layers.tp(2), (70, 1, 64, 129, 33)
    ready = engine_inputs(layer_class, real)
    layer = ready.prepared(layer_class)
    poison(layer)
    assert layer.run(ready.step) == layer.run(padded := with_empty_requests(ready.step, extra))
    assert padded.out[:5].equal(ready.step.out) and bool(ready.step.out.isfinite().all())
    assert bool((padded.out[5:] == 0).all())


@pytest.mark.parametrize("parallel", ["tp", "dcp"])
def test_padded_rows_have_the_bits_of_declared_ones(layers: LayerFactory, parallel: str) -> None:
    """9 rows padded to 16 against the same requests in steps of 5 and 4 rows, never padded."""
    contexts = (70, 1, 64, 129, 33, 512, 5, 16, 17)
    layer_class = layers.tp(2, mode="late") if parallel == "tp" else layers.dcp(2, mode="fork")

    def body(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ready = engine_inputs(layer_class, contexts, rank=comm.rank if comm else 0)
        layer = ready.prepared(layer_class, comm=comm)
        layer.run(ready.step)
        parts = [_cut(ready.step, slice(0, 5)), _cut(ready.step, slice(5, 9))]
        for part in parts:
            layer.run(part)
        return ready.step.out, torch.cat([part.out for part in parts])

    results = VirtualRanks(2).run(body) if layer_class.CONTEXT_PARALLEL else [body(None)]
    for whole, cut in results:
        assert whole.equal(cut) and bool(whole.isfinite().all())


def _cut(step: Step, rows: slice) -> Step:
    """Some requests of a step with one row each; the output is NaN."""
    tensors = {name: value[rows] for name, value in given(step).items()}
    return Step(**{**tensors, "out": torch.full_like(step.out[rows], torch.nan)}, q=1)


# -- stopping -----------------------------------------------------------------------------------

# What is new behind the last op of each stage of dsa_tp, in host order (rows 5, sm_90a): the query
# stage begins with the norm, and its last op is issued behind the index path.
WRITES = {
    "projection": ("projected",),
    "indexer": ("q_c", "index_q", "index_q8", "index_w", "scores", "selected", "valid"),
    "query": ("query",),
    "sparse_core": ("latent",),
    "value": ("gated",),
    "o_proj": (),
}


# The projection's last op is the gate's GEMM, issued ahead of its join behind the core.
WRITES_APART = {
    "indexer": WRITES["projection"] + WRITES["indexer"],
    "query": ("query",),
    "sparse_core": ("latent",),
    "projection": (),
    "value": ("gated",),
    "o_proj": (),
}


@pytest.mark.parametrize(
    ("mode", "writes", "stage"),
    [
        *(("fork", WRITES, stage) for stage in WRITES),
        *(("apart_fork", WRITES_APART, stage) for stage in WRITES_APART),
    ],
)
def test_stop_after_leaves_later_buffers_alone(
    layers: LayerFactory, mode: str, writes: dict[str, tuple[str, ...]], stage: str
) -> None:
    layer_class = layers.tp(4, mode=mode)
    ready = engine_inputs(layer_class, (70, 1, 64, 129, 33))
    layer = ready.prepared(layer_class)
    poison(layer)
    before = {name: buffer.clone() for name, buffer in layer.buffers.items()}
    layer.run(ready.step, stop_after=stage)
    written = {
        name
        for name, buffer in layer.buffers.items()
        if not buffer.view(torch.uint8).equal(before[name].view(torch.uint8))
    }
    ended = list(writes)
    reached = ended[: ended.index(stage) + 1]
    assert written == {name for entered in reached for name in writes[entered]}
    assert bool(ready.step.out.isnan().all()) == (stage != "o_proj")


def test_a_run_after_a_stopped_one_is_whole(layers: LayerFactory) -> None:
    layer_class = layers.tp(4)
    ready = engine_inputs(layer_class, (70, 1, 64))
    layer = ready.prepared(layer_class)
    layer.run(ready.step, stop_after="query")
    layer.run(ready.step)
    stopped = ready.step.out.clone()
    again = engine_inputs(layer_class, (70, 1, 64))
    again.prepared(layer_class).run(again.step)
    assert stopped.equal(again.step.out)
