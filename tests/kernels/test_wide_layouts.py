"""The wide core's shared memory, byte by byte: what is stored is what wgmma reads.

The stores and the instructions are those of the code under test, run on integers; how wgmma finds
an element behind a descriptor is written here from the instruction set's definition.
"""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kpipe.runtime.device import half, mma, operand_blocks, wgmma, wide_rows, wide_softmax

KEYS = HEADS = 64
BLOCKS = 9
KV_BLOCKS = 8


class Memory:
    """Shared memory that the patched stores fill; a byte may be stored once."""

    def __init__(self, monkeypatch, size: int) -> None:
        self.words = torch.zeros(size // 4, dtype=torch.int64)
        self.stored = torch.zeros(size // 4, dtype=torch.bool)
        monkeypatch.setattr(operand_blocks, "store_chunk", self.store)
        monkeypatch.setattr(operand_blocks, "store_pair", lambda at, word: self.store(at, [word]))

    def store(self, address: int, words: list[int]) -> None:
        assert address % (4 * len(words)) == 0, "misaligned"
        span = slice(address // 4, address // 4 + len(words))
        assert not self.stored[span].any(), "stored twice"
        self.stored[span] = True
        self.words[span] = torch.tensor(words)

    def elements(self, addresses: Tensor) -> Tensor:
        """The F16 at byte addresses, behind the 128-byte swizzle, in float64."""
        numbers = self.words.to(torch.uint32).view(torch.float16)
        swizzled = addresses ^ (addresses >> 7 & 7) << 4
        return numbers[swizzled // 2].double()


def fields(descriptor: int) -> SimpleNamespace:
    """Start, leading and stride offsets of a descriptor, in bytes."""
    assert descriptor >> 62 == 1, "128-byte swizzle"
    assert descriptor >> 46 & 0xFFFF == 0, "no base offset"
    assert descriptor >> 14 & 3 == descriptor >> 30 & 3 == 0, "bits between the fields"
    parts = [(descriptor >> shift & 0x3FFF) * 16 for shift in (0, 16, 32)]
    return SimpleNamespace(start=parts[0], leading=parts[1], stride=parts[2])


def summed_columns(memory: Memory, descriptor: int, rows: int) -> Tensor:
    """[rows, 16] of an operand whose 16 summed elements are contiguous."""
    at, r, k = fields(descriptor), torch.arange(rows)[:, None], torch.arange(16)
    return memory.elements(at.start + r // 8 * at.stride + r % 8 * 128 + k * 2)


def summed_rows(memory: Memory, descriptor: int, columns: int) -> Tensor:
    """[16, columns] of an operand whose columns are contiguous, 64 at a time."""
    at, k, n = fields(descriptor), torch.arange(16)[:, None], torch.arange(columns)
    inner = n // 64 * at.leading + n % 64 * 2
    return memory.elements(at.start + k // 8 * at.stride + k % 8 * 128 + inner)


def number(descriptor) -> int:
    """A descriptor that was computed from integers."""
    return int(descriptor.value) & (1 << 64) - 1


STEP = re.compile(r"m64n(\d+)k16\.f32\.(\w+)\.\w+ \{\$(\d+).*?\}, a, b, (more|none), 1, 1, 0, (\d)")


def run(monkeypatch, memory: Memory, product, left: int, right: int) -> Tensor:
    """C [64, columns] of the instructions that `product` issues for two descriptors."""
    issued = {}
    monkeypatch.setattr(wgmma, "require", lambda: None)
    monkeypatch.setattr(
        wgmma, "_issue", lambda lines, results, *rest: issued.update(lines=lines, results=results)
    )
    product(left, right)
    c = torch.zeros(64, 2 * issued["results"], dtype=torch.float64)
    at = {}
    for line in " ".join(issued["lines"][1:]).split(";"):
        if moved := re.match(r"\s*add\.s64 ([ab]), \$\d+, (\d+)", line):
            at[moved[1]] = (left if moved[1] == "a" else right) + int(moved[2])
        elif step := STEP.search(line):
            columns, first = int(step[1]), 2 * int(step[3])
            summed = {
                "0": lambda n: summed_columns(memory, at["b"], n).T,
                "1": lambda n: summed_rows(memory, at["b"], n),
            }
            part = c[:, first : first + columns]
            part *= step[4] == "more"
            part += summed_columns(memory, at["a"], 64) @ summed[step[5]](columns)
    return c


def pack(first: float, second: float) -> int:
    """Two numbers as a pair of F16."""
    pair = torch.tensor([first, second], dtype=torch.float16)
    return int(pair.view(torch.int32)) & 0xFFFF_FFFF


def values_of(codes: Tensor) -> Tensor:
    """E4M3 codes in float64."""
    return codes.view(torch.float8_e4m3fn).double()


def fill(monkeypatch, rows: wide_rows.WideFp8TensorRows, codes: Tensor, blocks: int) -> None:
    """Converts all rows of codes as the lanes of the gathering warps do."""
    numbers = values_of(torch.arange(256).to(torch.uint8)).tolist()

    def widen(word: int) -> tuple[int, int]:
        octets = [numbers[word >> shift & 0xFF] for shift in (0, 8, 16, 24)]
        return pack(*octets[:2]), pack(*octets[2:])

    monkeypatch.setattr(half, "widen_e4m3", widen)
    words = codes.view(torch.int32).long() & 0xFFFF_FFFF

    def load(address: int) -> list[int]:
        row, byte = divmod(address, rows.row_bytes)
        assert byte % 16 == 0
        return words[row, byte // 4 : byte // 4 + 4].tolist()

    monkeypatch.setattr(wide_rows, "Int64", int)
    monkeypatch.setattr(wide_rows, "load_vector", load)
    for first, lane in itertools.product(range(0, KEYS, 8), range(32)):
        shuffle = SimpleNamespace(shuffle_sync=lambda index, lane, first=first: first + lane // 4)
        monkeypatch.setattr(wide_rows, "cute", SimpleNamespace(arch=shuffle))
        feed: dict[tuple, int] = {}
        rows.fill(feed, 0, first + lane // 4, lane)
        assert len(feed) == 4 * rows.vectors
        rows.convert(feed, blocks, first, lane, None)


@pytest.fixture
def filled(monkeypatch) -> SimpleNamespace:
    """Query, keys and weights in shared memory, and their values."""
    generator = torch.Generator().manual_seed(7)
    rows = wide_rows.WideFp8TensorRows(512, 64)
    assert rows.blocks == BLOCKS and rows.row_bytes == 576
    memory = Memory(monkeypatch, (2 * BLOCKS + 1) * operand_blocks.BYTES)
    shape = (64, rows.row_bytes)
    drawn = [torch.randint(0, 0x70, shape, generator=generator) for _ in range(2)]
    signs = [torch.randint(0, 2, shape, generator=generator) << 7 for _ in range(2)]
    query, keys = ((a | b).to(torch.uint8) for a, b in zip(drawn, signs, strict=True))
    starts = [place * operand_blocks.BYTES for place in (0, BLOCKS, 2 * BLOCKS)]
    fill(monkeypatch, rows, query, starts[0])
    fill(monkeypatch, rows, keys, starts[1])
    weights = torch.rand(HEADS, KEYS, generator=generator).half().double()
    monkeypatch.setattr(half, "pack", pack)
    for warp, lane in itertools.product(range(wgmma.WARPS), range(32)):
        group, group_lane = mma.fragment_place(lane)
        row = warp * mma.TILE_M + group
        held = [
            weights[row + side * 8, key].item()
            for tile in range(wide_softmax.TILES)
            for side in range(2)
            for key in wide_softmax.tile_keys(tile, group_lane)
        ]
        wide_softmax.store_weights(held, starts[2], row, group_lane)
    assert memory.stored.all(), "a byte was never stored"
    return SimpleNamespace(
        memory=memory,
        blocks=[number(operand_blocks.descriptor(start)) for start in starts],
        query=values_of(query),
        keys=values_of(keys),
        weights=weights,
    )


@pytest.mark.parametrize("rank", [1, 7, 15])
def test_descriptors_are_the_same_in_every_cta(rank):
    """In a cluster, shared addresses carry the CTA's rank from bit 24 on."""
    for address in (1024, 9 * operand_blocks.BYTES, 227 * 1024 - 1024):
        alone = number(operand_blocks.descriptor(address))
        assert fields(alone) == SimpleNamespace(start=address, leading=8192, stride=1024)
        assert number(operand_blocks.descriptor(address | rank << 24)) == alone


@pytest.mark.parametrize("blocks", [range(BLOCKS), range(KV_BLOCKS), range(KV_BLOCKS, BLOCKS)])
def test_scores_read_what_was_stored(monkeypatch, filled, blocks):
    query, keys, _ = filled.blocks
    steps = range(blocks.start * 4, blocks.stop * 4)

    def product(left, right):
        return wgmma.row_products.__wrapped__(left, right, "f16", steps)

    c = run(monkeypatch, filled.memory, product, query, keys)
    columns = slice(64 * blocks.start, 64 * blocks.stop)
    assert torch.equal(c, filled.query[:, columns] @ filled.keys[:, columns].T)


@pytest.mark.parametrize("warpgroup", [0, 1])
def test_values_read_what_was_stored(monkeypatch, filled, warpgroup):
    _, keys, weights = filled.blocks
    first = fields(keys).start + warpgroup * 4 * operand_blocks.BYTES

    def product(left, right):
        return wgmma.add_column_products.__wrapped__([None] * 128, left, right, 0)

    values = number(operand_blocks.descriptor(first))
    c = run(monkeypatch, filled.memory, product, weights, values)
    columns = slice(256 * warpgroup, 256 * (warpgroup + 1))
    expected = filled.weights @ filled.keys[:, columns]
    torch.testing.assert_close(c, expected, rtol=1e-12, atol=1e-9)


def test_stores_meet_all_banks():
    """Eight lanes at a time store 16 bytes each: two rows, four lanes a row."""
    for first, chunk in itertools.product(range(0, 64, 2), range(2)):
        places = [
            operand_blocks.place(first + row, 2 * lane + chunk)
            for row in range(2)
            for lane in range(4)
        ]
        assert sorted(place // 16 % 8 for place in places) == list(range(8))


def test_rows_are_given_back_behind_their_reads(monkeypatch):
    """At the s-th barrier the warp arrives once the instructions on rows 16 s.. are over."""
    issued = {}
    monkeypatch.setattr(wgmma, "require", lambda: None)
    monkeypatch.setattr(wgmma, "_issue", lambda lines, *rest: issued.update(lines=lines))
    wgmma.add_column_products.__wrapped__([None] * 128, 0, 0, 0)
    groups, steps, over, given = [], [], [], []
    for line in " ".join(issued["lines"]).split(";"):
        if moved := re.match(r"\s*add\.s64 b, \$\d+, (\d+)", line):
            steps.append(int(moved[1]) * 16 % operand_blocks.BYTES // (16 * 128))
        elif "commit_group" in line:
            groups, steps = [*groups, steps], []
        elif waited := re.search(r"wait_group\.sync\.aligned (\d)", line):
            over = [step for group in groups[: len(groups) - int(waited[1])] for step in group]
        elif arrived := re.search(r"@lead mbarrier\.arrive\S* _, \[\$258 \+ (\d+)\]", line):
            assert over.count(int(arrived[1]) // 8) == 2, "both halves of 256 columns"
            given.append(int(arrived[1]) // 8)
    assert given == list(range(4)) and len(groups) == 4
