"""Overlap of tensors: against the sets of their bytes, and for the layouts that engines use."""

from __future__ import annotations

import random

import torch

from kpipe.runtime.storage import Block, block_of, overlaps


def bytes_of(block: Block) -> set[int]:
    return {
        block.base + piece * block.stride + byte
        for piece in range(block.count)
        for byte in range(block.bytes)
    }


def random_block(rng: random.Random, name: str) -> Block:
    size = rng.randrange(0, 6)
    return Block(
        name,
        rng.randrange(0, 40),
        size,
        rng.choice((1, 1, 2, 3, 5)),
        size + rng.choice((0, 0, 1, 3, 8)),
        rng.random() < 0.7,
    )


def test_overlaps_are_those_of_the_bytes() -> None:
    rng = random.Random(7)
    hits = interleaved = 0
    for _ in range(3000):
        blocks = [random_block(rng, f"b{number}") for number in range(rng.randint(2, 6))]
        expected = {
            frozenset((one.name, other.name))
            for number, one in enumerate(blocks)
            for other in blocks[number + 1 :]
            if (one.written or other.written) and bytes_of(one) & bytes_of(other)
        }
        found = overlaps(blocks)
        assert {frozenset((one.name, other.name)) for one, other in found} == expected
        assert len(found) == len(expected)
        hits += bool(expected)
        interleaved += any(
            one.base < other.end and other.base < one.end and not bytes_of(one) & bytes_of(other)
            for number, one in enumerate(blocks)
            for other in blocks[number + 1 :]
        )
    assert hits > 500 and interleaved > 500


def test_a_tensor_is_the_bytes_that_it_addresses() -> None:
    rng = random.Random(8)
    pool = torch.zeros(4096, dtype=torch.uint8)
    for _ in range(300):
        pages, page, row, gap = (rng.randint(1, 4) for _ in range(4))
        stride = (page * row) + rng.choice((0, gap))
        offset = rng.randrange(64)
        tensor = pool.as_strided((pages, page, row), (stride, row, 1), offset)
        expected = {
            tensor[i, j, k].data_ptr()
            for i in range(pages)
            for j in range(page)
            for k in range(row)
        }
        assert bytes_of(block_of("t", tensor)) == expected


def test_other_layouts_count_from_their_first_byte_to_their_last() -> None:
    tensor = torch.zeros(6, 8, dtype=torch.int32)
    block = block_of("t", tensor[1:5, 2:4].t())
    assert (block.base - tensor.data_ptr(), block.bytes, block.count) == (40, 104, 1)
    empty = block_of("e", tensor[:0])
    assert overlaps([empty, block_of("t", tensor)]) == []


def test_caches_that_take_turns_in_one_pool_do_not_overlap() -> None:
    pool = torch.zeros(4, 640, dtype=torch.uint8)
    latent = pool[:, :512].unflatten(1, (4, 128))
    index = pool[:, 512:].unflatten(1, (4, 32))
    blocks = [block_of("latent_kv", latent), block_of("index_kv", index)]
    assert overlaps(blocks) == []
    late = pool[:, 511:639].unflatten(1, (4, 32))
    assert [(a.name, b.name) for a, b in overlaps([blocks[0], block_of("index_kv", late)])] == [
        ("latent_kv", "index_kv")
    ]


def test_what_nobody_writes_may_be_shared() -> None:
    weights = [Block(name, 0, 64, written=False) for name in ("q_b", "tied")]
    assert overlaps(weights) == []
    (found,) = overlaps([*weights[:1], Block("gated", 32, 64)])
    assert [block.name for block in found] == ["q_b", "gated"]
