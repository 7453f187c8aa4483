"""The wide core's merge on plain numbers: who sends what where, and what the owners make of it.

The code under test runs with a memory that keeps what was sent; the order of fragments in a warp is
that of the instruction set, and the softmax is taken here over all keys at once.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kpipe.runtime.device import inbox, mma, wgmma, wide_sums
from kpipe.runtime.device.wide_sums import WideSums

TILES = 16  # of 8 columns
VALUE_WARPS = 8
FRAGMENTS = TILES * wgmma.WARPS // VALUE_WARPS  # of a warp
HEADS = 64
BARRIER = "arrived"


class Memory:
    """FP32 of one shape in every CTA, as the CTA `here` sees it."""

    def __init__(self, ctas: int, *shape: int) -> None:
        self.of = [torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(ctas)]
        self.here = 0
        self.sent = [0] * ctas

    def __getitem__(self, index: tuple):
        if index[-1] is None:
            return SimpleNamespace(index=index[:-1], memory=self, load=lambda: self.read(index))
        return self.of[self.here][index]

    def read(self, index: tuple) -> Tensor:
        return self.of[self.here][index[:-1]]

    def store(self, index: tuple, values: list[float], cta: int) -> None:
        assert self.of[cta][index].isnan().all(), "sent twice"
        self.of[cta][index] = torch.tensor(values, dtype=torch.float64)
        self.sent[cta] += 4 * len(values)


class Vector(list):
    """Registers of a lane."""

    def load(self) -> Vector:
        return self


@pytest.fixture
def cluster(monkeypatch, request) -> WideSums:
    """The sums of a cluster of as many CTAs as the parameter says."""
    splits = request.param
    owned = wide_sums.owned_tiles(TILES, splits)
    fma = SimpleNamespace(fma=lambda a, b, c: a * b + c)
    stub = SimpleNamespace(
        size=len,
        arch=SimpleNamespace(exp2=torch.exp2, fmax=torch.maximum),
        math=fma,
        make_rmem_tensor=lambda shape, dtype: Vector([None] * shape[0]),
    )
    monkeypatch.setattr(wide_sums, "cute", stub)
    monkeypatch.setattr(wide_sums, "cutlass", SimpleNamespace(min=min, max=max))
    monkeypatch.setattr(wide_sums, "Float32", float)

    def send(values: Vector, place, barrier, cta: int) -> None:
        assert barrier == BARRIER
        place.memory.store(place.index, values, cta)

    monkeypatch.setattr(inbox, "send", send)
    return WideSums(
        tiles=TILES,
        splits=splits,
        sums=Memory(splits, splits, owned, wgmma.WARPS, 32, mma.FRAGMENT),
        masses=Memory(splits, splits, HEADS, 2),
        arrived=BARRIER,
    )


def held(matrix: Tensor, warp: int, lane: int) -> Vector:
    """C fragments of a value warp's lane, of [HEADS, 8 * TILES] sums."""
    row = warp % wgmma.WARPS * 16 + lane // 4
    first = warp // wgmma.WARPS * FRAGMENTS * 8
    return Vector(
        matrix[row + 8 * side, first + 8 * tile + 2 * (lane % 4) + column]
        for tile in range(FRAGMENTS)
        for side in range(2)
        for column in range(2)
    )


def send_all(cluster: WideSums, parts: list[Tensor], maxima: Tensor, masses: Tensor) -> None:
    """Every CTA sends its part: sums [HEADS, columns], maxima and masses (CTA, head)."""
    for rank in range(cluster.splits):
        for warp, lane in itertools.product(range(VALUE_WARPS), range(32)):
            cluster.send(held(parts[rank], warp, lane), rank, warp, lane)
        for head, target in itertools.product(range(HEADS), range(cluster.splits)):
            cluster.send_mass(maxima[rank, head], masses[rank, head], rank, head, target)


@pytest.mark.parametrize("cluster", [3, 7], indirect=True)
def test_merge_is_one_softmax(monkeypatch, cluster):
    """Keys dealt out to the CTAs, one of them without any: results as over all keys at once."""
    splits = cluster.splits
    generator = torch.Generator().manual_seed(splits)
    logits = 4 * torch.randn(splits, HEADS, 5, generator=generator, dtype=torch.float64)
    values = torch.randn(splits, 5, 8 * TILES, generator=generator, dtype=torch.float64)
    logits[1] = -torch.inf
    maxima = logits.amax(2).ceil()
    weights = torch.exp2(logits - maxima[..., None]).nan_to_num(0)
    send_all(cluster, list(weights @ values), maxima, weights.sum(2))

    counted = []
    monkeypatch.setattr(inbox, "open_inbox", lambda barrier, size: counted.append(size))
    merged = torch.full((HEADS, 8 * TILES), torch.nan, dtype=torch.float64)
    for rank in range(splits):
        cluster.expect(rank)
        cluster.sums.here = cluster.masses.here = rank
        for warp, lane in itertools.product(range(wgmma.WARPS), range(32)):
            rows = [warp * 16 + lane // 4 + 8 * side for side in range(2)]
            shares = [cluster.shares(row) for row in rows]
            for row, (_, mass, highest) in zip(rows, shares, strict=True):
                whole = torch.logsumexp(logits[:, row].flatten() * math.log(2), 0) / math.log(2)
                assert torch.isclose(torch.log2(mass) + highest, whole)
            factors = [[factor / mass for factor in parts] for parts, mass, _ in shares]
            for tile in range(cluster.present(rank)):
                part = cluster.merge(factors, tile, warp, lane)
                first = 8 * (rank * cluster.owned + tile) + 2 * (lane % 4)
                for element, value in enumerate(part):
                    merged[rows[element // 2], first + element % 2] = value
    sent = [a + b for a, b in zip(cluster.sums.sent, cluster.masses.sent, strict=True)]
    assert counted == sent, "bytes that the inboxes wait for"
    shares = torch.softmax(logits.permute(1, 0, 2).flatten(1) * math.log(2), 1)
    torch.testing.assert_close(merged, shares @ values.flatten(0, 1))
