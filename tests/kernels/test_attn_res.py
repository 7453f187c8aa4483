"""AttnRes of a row: shares and mean square from dots alone, against the definition; its cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kpipe.runtime.device import attn_res, scalar
from kpipe.runtime.device.attn_res import PAIRS, VECTORS, AttnRes
from kpipe.runtime.metadata import MOST_SAVED
from kpipe.runtime.oracle.residual import make_mix_weights, mix_shares

WIDTH, EPS = 512, 1e-2


class Real(float):
    """A host number in the place of the device's."""

    inf = float("inf")


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch):
    maths = SimpleNamespace(
        exp2=lambda x, fastmath: 2.0**x,
        rsqrt=lambda x, fastmath: x**-0.5,
        fma=lambda x, y, z: x * y + z,
    )
    monkeypatch.setattr(attn_res, "Float32", Real)
    monkeypatch.setattr(
        attn_res, "cute", SimpleNamespace(arch=SimpleNamespace(fmax=max), math=maths)
    )
    monkeypatch.setattr(scalar, "select", lambda condition, a, b: a if condition else b)


def dots_of(saved: torch.Tensor, stream: torch.Tensor, query: torch.Tensor) -> list[float]:
    """What the threads of a row sum up: absent blocks are zeros."""
    vectors = torch.zeros(VECTORS, WIDTH, dtype=torch.float64)
    vectors[: len(saved)], vectors[-1] = saved.double(), stream.double()
    dots = [float(vector @ query) for vector in vectors]
    return dots + [float(vectors[one] @ vectors[other]) for one, other in PAIRS]


@pytest.mark.parametrize("blocks", range(MOST_SAVED + 1))
def test_shares_and_mean_square_follow_from_the_dots(blocks):
    generator = torch.Generator().manual_seed(blocks)
    saved = torch.randn(blocks, WIDTH, generator=generator) * 3
    stream, weights = torch.randn(WIDTH, generator=generator), make_mix_weights(WIDTH, blocks)
    query = weights.mix_norm.double() * weights.mix_query.double()
    shares, square = AttnRes(WIDTH, EPS)._shares(dots_of(saved, stream, query), blocks)
    expected = mix_shares(saved[:, None], stream[None], weights, EPS)[:, 0]
    assert torch.tensor([*shares[:blocks], shares[-1]]).allclose(expected.float(), atol=1e-6)
    assert shares[blocks:-1] == [0.0] * (MOST_SAVED - blocks)
    mix = expected @ torch.cat([saved, stream[None]]).double()
    assert square == pytest.approx(float(mix.square().sum()), rel=1e-6)


def test_a_row_of_zeros_has_equal_shares():
    shares, square = AttnRes(WIDTH, EPS)._shares([0.0] * attn_res.DOTS, 1)
    assert (shares[0], shares[-1], square) == (0.5, 0.5, 0.0)


def test_a_dot_adds_every_column_once():
    assert attn_res._dot([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]) == 32.0


@pytest.mark.parametrize(
    ("width", "parts", "threads"), [(7168, 7, 128), (256, 1, 32), (7680, 6, 160), (8192, 8, 128)]
)
def test_a_cluster_holds_a_row(width, parts, threads):
    mixer = AttnRes(width, EPS)
    assert (mixer.parts, mixer.threads) == (parts, threads)


def test_columns_that_are_no_whole_warps_have_no_cluster():
    assert AttnRes(264, EPS).parts == 0
