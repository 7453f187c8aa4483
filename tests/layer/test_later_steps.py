"""Steps behind the first one: what is kept from it is used for what is the same, and nothing else.

Kernels are stand-ins that check their operands against their declarations and keep them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from idle_device import Device, Launched
from layer_factory import LayerFactory
from layer_inputs import Inputs, engine_inputs

from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError, Step, given

LENGTHS = (70, 1, 64, 129, 33, 5, 7, 9)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def prepared(layers: LayerFactory, lengths: tuple[int, ...] = LENGTHS) -> tuple[Inputs, Layer]:
    layer_class = layers.tp(4, mode="fork")
    ready = engine_inputs(layer_class, lengths)
    return ready, ready.prepared(layer_class, backend="cuda", arch="sm_90a")


def cloned(step: Step) -> Step:
    """The same step in other memory."""
    return replace(step, **{name: tensor.clone() for name, tensor in given(step).items()})


def cut(step: Step, rows: int) -> Step:
    """The first rows of a step of one row a request, in memory of their own."""
    return replace(step, **{name: one[:rows].clone() for name, one in given(step).items()})


def launched(device: Device, layer: Layer, step: Step) -> list[Launched]:
    device.launched.clear()
    layer.run(step)
    return list(device.launched)


def places(found: list[Launched], step: Step) -> dict[tuple[str, str], str]:
    """(kernel, operand) -> field of the step whose memory it was handed."""
    fields = {tensor.data_ptr(): name for name, tensor in given(step).items()}
    return {
        (one.kernel, name): fields[tensor.data_ptr()]
        for one in found
        for name, tensor in one.operands.items()
        if tensor.data_ptr() in fields
    }


# What the kernels of the mode fork take of a step, by the maths of the layer.
TAKEN = {
    ("PackedGemm", "hidden"): "hidden",
    ("DsaIndex", "index_slots"): "index_slots",
    ("IndexScores", "index_table"): "index_table",
    ("IndexScores", "lengths"): "lengths",
    ("TopkSelect", "lengths"): "lengths",
    ("TopkSelect", "block_table"): "block_table",
    ("MlaQuery", "slots"): "slots",
    ("MlaValue", "lengths"): "lengths",
    ("OProj", "out"): "out",
}


def test_a_step_in_other_memory_is_what_the_kernels_get(
    layers: LayerFactory, device: Device
) -> None:
    ready, layer = prepared(layers)
    steps = [ready.step, cloned(ready.step), cloned(ready.step), ready.step]
    for step in steps:
        assert places(launched(device, layer, step), step) == TAKEN


def test_new_tensors_in_a_known_record_are_seen(layers: LayerFactory, device: Device) -> None:
    """An engine may keep its record and put other tensors into it."""
    ready, layer = prepared(layers)
    layer.run(ready.step)
    other = cloned(ready.step)
    for name, tensor in given(other).items():
        setattr(ready.step, name, tensor)
    assert places(launched(device, layer, ready.step), other) == TAKEN


def test_memory_that_is_put_behind_a_known_tensor_is_seen(
    layers: LayerFactory, device: Device
) -> None:
    ready, layer = prepared(layers)
    layer.run(ready.step)
    other = cloned(ready.step)
    for name, tensor in given(other).items():
        getattr(ready.step, name).data = tensor
    assert places(launched(device, layer, ready.step), other) == TAKEN


def test_steps_of_several_sizes_get_the_views_of_their_size(
    layers: LayerFactory, device: Device
) -> None:
    ready, layer = prepared(layers)
    for rows in (8, 1, 5, 8, 5, 1):
        step = cut(ready.step, rows)
        found = launched(device, layer, step)
        views = vars(layer.views(rows))
        sizes = {
            (one.kernel, name): tensor.shape[views[name].shape.index(rows)]
            for one in found
            for name, tensor in one.operands.items()
            if isinstance(views.get(name), torch.Tensor)
        }
        assert set(sizes.values()) == {rows} and len(sizes) > 10
        assert places(found, step) == TAKEN


def test_views_are_the_same_objects_in_every_step(layers: LayerFactory, device: Device) -> None:
    """What a launch is handed of the layer's own is made once: the objects do not change."""
    ready, layer = prepared(layers)
    mine = [
        {(one.kernel, name): id(tensor) for name, tensor in one.operands.items()}
        for one in (*launched(device, layer, ready.step), *launched(device, layer, ready.step))
    ]
    first, second = mine[: len(mine) // 2], mine[len(mine) // 2 :]
    assert first == second


def test_an_op_that_is_handed_something_else_launches_on_that(
    layers: LayerFactory, device: Device
) -> None:
    ready, layer = prepared(layers)
    layer.run(ready.step)
    at = layer._views
    for _ in range(3):
        other = torch.empty_like(at.q_c)
        device.launched.clear()
        layer.query_norm(at.q_a, other)
        layer.query_norm(at.q_a, at.q_c)
        found = [one.operands["q_c"].data_ptr() for one in device.launched]
        assert found == [other.data_ptr(), at.q_c.data_ptr()]


def test_flags_are_those_of_the_call(layers: LayerFactory, device: Device) -> None:
    ready, layer = prepared(layers)
    layer.run(ready.step)
    at = layer._views
    device.launched.clear()
    for release in (True, False, True):
        layer.query_norm(at.q_a, at.q_c, release=release)
    assert [one.flags["release"] for one in device.launched] == [True, False, True]


def test_more_operands_than_the_op_has_are_refused(layers: LayerFactory, device: Device) -> None:
    _, layer = prepared(layers)
    layer._views = layer.views(8)
    with pytest.raises(TypeError, match=r"^query_norm takes \d operands at most, 9 given$"):
        layer.query_norm(*[layer._views.q_c] * 9)


# -- what is refused ----------------------------------------------------------------------------


def shorter_lengths(step: Step) -> None:
    step.lengths = step.lengths[:-1]


def other_dtype(step: Step) -> None:
    step.slots = step.slots.int()


def other_dtype_of_as_many_bytes(step: Step) -> None:
    step.hidden = step.hidden.view(torch.float16)


def dtype_behind_the_tensor(step: Step) -> None:
    step.hidden.data = step.hidden.view(torch.float16)


def resized_in_place(step: Step) -> None:
    step.index_slots.resize_(step.index_slots.shape[0] - 1)


def transposed_in_place(step: Step) -> None:
    step.hidden.t_()


def left_out(step: Step) -> None:
    step.index_table = None


def no_tensor(step: Step) -> None:
    step.index_table = step.index_table.tolist()  # type: ignore[assignment]


def too_much(step: Step) -> None:
    step.prefix = torch.zeros_like(step.hidden)


def output_is_input(step: Step) -> None:
    step.out = step.hidden


def output_runs_into_input(step: Step) -> None:
    both = torch.zeros(2 * step.rows - 1, step.hidden.shape[1], dtype=step.hidden.dtype)
    step.hidden, step.out = both[: step.rows], both[step.rows - 1 :]


def output_is_strided_over_input(step: Step) -> None:
    both = torch.zeros(step.rows + 1, step.hidden.shape[1], dtype=step.hidden.dtype)
    step.hidden, step.out = both[: step.rows], both[1:]


def other_queries(step: Step) -> None:
    step.q = 4


def undeclared_queries(step: Step) -> None:
    step.q = 3


SPOILED = [
    *(shorter_lengths, other_dtype, other_dtype_of_as_many_bytes, dtype_behind_the_tensor),
    *(resized_in_place, transposed_in_place, left_out, no_tensor, too_much, output_is_input),
    *(output_runs_into_input, output_is_strided_over_input, other_queries, undeclared_queries),
]


def error_of(layer: Layer, step: Step) -> tuple[type[Exception], str]:
    with pytest.raises(ValueError) as caught:
        layer.run(step)
    return type(caught.value), str(caught.value)


@pytest.mark.parametrize("spoil", SPOILED)
def test_what_is_refused_at_first_is_refused_later(
    layers: LayerFactory, device: Device, spoil: Callable[[Step], None]
) -> None:
    """The very error of a first step, behind steps that have passed, and again and again."""
    fresh, first = prepared(layers)
    spoil(fresh.step)
    wanted = error_of(first, fresh.step)
    ready, layer = prepared(layers)
    layer.run(ready.step)
    layer.run(cloned(ready.step))
    good = cloned(ready.step)
    layer.run(ready.step)
    spoil(ready.step)
    device.launched.clear()
    assert error_of(layer, ready.step) == wanted == error_of(layer, ready.step)
    assert device.launched == []
    layer.run(good)
    assert error_of(layer, ready.step) == wanted


def test_a_step_inside_the_layers_memory_is_refused_later(
    layers: LayerFactory, device: Device
) -> None:
    ready, layer = prepared(layers)
    layer.run(ready.step)
    inside = layer.buffers["valid"].flatten()[: len(LENGTHS)]
    step = replace(ready.step, lengths=inside)
    with pytest.raises(LayerError, match="buffer valid and step lengths share storage"):
        layer.run(step)


def test_a_step_on_another_device_is_refused_later(layers: LayerFactory, device: Device) -> None:
    ready, layer = prepared(layers)
    layer.run(ready.step)
    step = replace(ready.step, hidden=ready.step.hidden.to("meta"))
    with pytest.raises(LayerError) as caught:
        layer.run(step)
    assert str(caught.value) == (
        f"{layer.NAME} step: hidden lies on meta, the layer was prepared on cpu"
    )


# -- padding ------------------------------------------------------------------------------------


def test_padding_is_made_anew_for_every_step(
    layers: LayerFactory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 and 9 rows become 16: real rows as handed in, then length 0, page 0, slot -1."""
    ready, layer = prepared(layers, tuple(range(20, 31)))
    for rows in (11, 9, 11):
        step = cut(ready.step, rows)
        found = launched(device, layer, step)
        seen = {name: tensor for one in found for name, tensor in one.operands.items()}
        for name, fill in (("lengths", 0), ("slots", -1), ("index_slots", -1), ("block_table", 0)):
            real, behind = seen[name][:rows], seen[name][rows:]
            assert seen[name].shape[0] == 16 and bool((behind == fill).all())
            assert real.equal(getattr(step, name)) and behind.numel()
        assert seen["hidden"][:rows].equal(step.hidden)
        assert not bool(seen["hidden"][rows:].any())


def test_the_rows_of_a_padded_step_get_their_output(
    layers: LayerFactory, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, layer = prepared(layers, tuple(range(20, 31)))
    real = layer.o_proj

    def filled(*operands: Any, out: torch.Tensor, **named: Any) -> None:
        out.copy_(torch.arange(16).reshape(-1, 1).expand_as(out))
        real(*operands, out=out, **named)

    layer.o_proj = filled
    for rows in (11, 9):
        step = cut(ready.step, rows)
        layer.run(step)
        assert step.out[:, 0].tolist() == list(range(rows))
