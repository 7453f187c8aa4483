"""The wide core's merge on plain numbers: what lies where, and what the owners make of it.

The code under test runs with a memory that keeps what was stored; the order of fragments in a warp
is that of the instruction set, and the softmax is taken here over all keys at once.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kpipe.runtime.device import cluster, mma, wgmma, wide_sums
from kpipe.runtime.device.wide_sums import WideSums

TILES = 16  # of 8 columns
VALUE_WARPS = 8
FRAGMENTS = TILES * wgmma.WARPS // VALUE_WARPS  # of a warp
HEADS = 64
MASS_WORDS = 4


class Memory:
    """FP32 of one shape in every CTA, as the CTA `here` sees it."""

    def __init__(self, ctas: int, *shape: int) -> None:
        self.of = [torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(ctas)]
        self.here = 0

    def __getitem__(self, index: tuple) -> SimpleNamespace:
        assert index[-1] is None
        return SimpleNamespace(
            store=lambda values: self.store(index[:-1], values),
            at=lambda cta: self.of[cta][index[:-1]],
        )

    def store(self, index: tuple, values: list[float]) -> None:
        assert self.of[self.here][index].isnan().all(), "stored twice"
        self.of[self.here][index] = torch.tensor(values, dtype=torch.float64)


class Vector(list):
    """Registers of a lane."""

    def load(self) -> Vector:
        return self


@pytest.fixture
def sums(monkeypatch, request) -> WideSums:
    """The sums of a cluster of as many CTAs as the parameter says."""
    splits = request.param
    fma = SimpleNamespace(fma=lambda a, b, c: a * b + c)
    stub = SimpleNamespace(
        size=len,
        arch=SimpleNamespace(exp2=torch.exp2, fmax=torch.maximum),
        math=fma,
        make_rmem_tensor=lambda shape, dtype: Vector([None] * shape[0]),
    )
    monkeypatch.setattr(wide_sums, "cute", stub)
    monkeypatch.setattr(wide_sums, "cutlass", SimpleNamespace(min=min))
    monkeypatch.setattr(wide_sums, "Float32", torch.tensor)
    monkeypatch.setattr(
        cluster, "load_floats", lambda place, count, cta: list(place.at(cta)[:count])
    )
    return WideSums(
        tiles=TILES,
        splits=splits,
        sums=Memory(splits, TILES, wgmma.WARPS, 32, mma.FRAGMENT),
        masses=Memory(splits, HEADS, MASS_WORDS),
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


def store_all(sums: WideSums, parts: list[Tensor], maxima: Tensor, masses: Tensor) -> None:
    """Every CTA stores its part: sums [HEADS, columns], maxima and masses (CTA, head)."""
    for rank in range(sums.splits):
        sums.sums.here = sums.masses.here = rank
        for warp, lane in itertools.product(range(VALUE_WARPS), range(32)):
            sums.store(held(parts[rank], warp, lane), warp, lane)
        for head in range(HEADS):
            entry = [maxima[rank, head], masses[rank, head], torch.nan, torch.nan]
            sums.masses[head, None].store(entry)


@pytest.mark.parametrize("sums", [3, 7], indirect=True)
def test_merge_is_one_softmax(sums):
    """Keys dealt out to the CTAs, one of them without any: results as over all keys at once."""
    splits = sums.splits
    generator = torch.Generator().manual_seed(splits)
    logits = 4 * torch.randn(splits, HEADS, 5, generator=generator, dtype=torch.float64)
    values = torch.randn(splits, 5, 8 * TILES, generator=generator, dtype=torch.float64)
    logits[1] = -torch.inf
    maxima = logits.amax(2).ceil()
    weights = torch.exp2(logits - maxima[..., None]).nan_to_num(0)
    store_all(sums, list(weights @ values), maxima, weights.sum(2))

    merged = torch.full((HEADS, 8 * TILES), torch.nan, dtype=torch.float64)
    for rank in range(splits):
        for warp, lane in itertools.product(range(wgmma.WARPS), range(32)):
            rows = [warp * 16 + lane // 4 + 8 * side for side in range(2)]
            shares = [sums.shares(row) for row in rows]
            for row, (_, mass, highest) in zip(rows, shares, strict=True):
                whole = torch.logsumexp(logits[:, row].flatten() * math.log(2), 0) / math.log(2)
                assert torch.isclose(torch.log2(mass) + highest, whole)
            factors = [[factor / mass for factor in parts] for parts, mass, _ in shares]
            for tile in range(sums.present(rank)):
                owned = rank * sums.owned + tile
                part = sums.merge(factors, owned, warp, lane)
                first = 8 * owned + 2 * (lane % 4)
                for element, value in enumerate(part):
                    merged[rows[element // 2], first + element % 2] = value
    shares = torch.softmax(logits.permute(1, 0, 2).flatten(1) * math.log(2), 1)
    torch.testing.assert_close(merged, shares @ values.flatten(0, 1))
