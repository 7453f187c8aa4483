"""Values that disagree: what right shapes and dtypes cannot show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layer_factory import LayerFactory
from layer_inputs import engine_inputs

from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.engine.consistency import check_step_values
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError, Step

CONTEXTS = (70, 0, 131, 2, 200)


def ready(layers: LayerFactory, ranks: int, q: int, interleave: int = 1) -> tuple[Layer, Step]:
    """The last rank's layer and step."""
    if ranks == 1:
        layer_class = layers.tp(4)
        inputs = engine_inputs(layer_class, CONTEXTS, q)
        return inputs.prepared(layer_class), inputs.step
    layer_class = layers.dcp(ranks, interleave)
    inputs = engine_inputs(layer_class, CONTEXTS, q, rank=ranks - 1)
    comm = VirtualRanks(ranks).rank(ranks - 1)
    return inputs.prepared(layer_class, comm=comm), inputs.step


@pytest.mark.parametrize(("ranks", "interleave"), [(1, 1), (2, 1), (2, 64)])
@pytest.mark.parametrize("q", [1, 4])
def test_what_the_oracle_hands_over_agrees(
    layers: LayerFactory, ranks: int, interleave: int, q: int
) -> None:
    layer, step = ready(layers, ranks, q, interleave)
    check_step_values(step, layer)


def refused(layer: Layer, step: Step, text: str) -> None:
    with pytest.raises(LayerError) as caught:
        check_step_values(step, layer)
    assert str(caught.value) == text


def test_values_that_disagree_are_named(layers: LayerFactory) -> None:
    layer, step = ready(layers, 1, 1)
    blocks, index_blocks = layer.latent_kv.blocks, layer.index_kv.blocks
    slot, block = int(step.slots[2]), int(step.block_table[2, 2])
    assert slot == block * 64 + 2  # token 130
    refused(
        layer,
        replace(step, lengths=torch.tensor([70, 0, -1, 2, 200], dtype=torch.int32)),
        "tp_4 step: lengths[2] is -1, below 0",
    )
    table = step.block_table.clone()
    table[4, 1] = blocks
    refused(
        layer,
        replace(step, block_table=table),
        f"tp_4 step: block_table[4, 1] is {blocks}, outside the {blocks} blocks of latent_kv",
    )
    refused(
        layer,
        replace(step, index_table=step.index_table[:, :3]),
        "tp_4 step: index_table[4] has 3 pages of 64, length 200 needs 4",
    )
    assert index_blocks
    question = "are both of this rank and layer, and of pages of 64 tokens?"
    refused(
        layer,
        replace(step, slots=step.slots * 32),  # of a pool whose pages are 2048 tokens
        f"tp_4 step: slots[0] is {int(step.slots[0]) * 32}, and block_table gives token 69 of "
        f"request 0 slot {int(step.slots[0])}: {question}",
    )
    refused(
        layer,
        replace(step, slots=step.slots.clamp(min=5)),
        f"tp_4 step: slots[1] is 5, and block_table gives token -1 of request 1 no slot of this "
        f"rank: {question}",
    )


def test_slots_of_all_ranks_beside_a_table_of_one(layers: LayerFactory) -> None:
    layer, step = ready(layers, 2, 1)
    foreign = int((step.slots < 0).nonzero()[1])  # request 1 inserts nothing anywhere
    slots = step.slots.clone()
    slots[foreign] = 7
    token = CONTEXTS[foreign] - 1
    refused(
        layer,
        replace(step, slots=slots),
        f"dcp_2_i1 step: slots[{foreign}] is 7, and block_table gives token {token} of request "
        f"{foreign} no slot of this rank: are both of this rank and layer, and of pages of 64 "
        "tokens?",
    )
