"""Shares of the pages of a step, run on the CPU from their PTX."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from cutlass import Int32, cute
from ptx_machine import Launch, packed, parse, run

from kpipe.runtime.device import page_share
from kpipe.runtime.host.compile import TensorSpec, compile_kernel, ptx_of
from kpipe.runtime.sharding import Shard

PAGE = 64
REACH = 4096  # keys that a table holds of a request


@dataclass(frozen=True)
class Shares:
    """Stores what every CTA is told of its share."""

    ahead: int = 0
    lead: int = 0

    @cute.jit
    def __call__(self, lengths: cute.Tensor, told: cute.Tensor, stream):
        self.shares(lengths, told).launch(
            grid=[told.shape[0], 1, 1], block=[32, 1, 1], stream=stream
        )

    @cute.kernel
    def shares(self, lengths: cute.Tensor, told: cute.Tensor):
        share = page_share.share(lengths, Int32(REACH), PAGE, Shard(), self.ahead, self.lead)
        cta = cute.arch.block_idx()[0]
        if cute.arch.thread_idx()[0] == 0:
            for place, value in enumerate(share):
                told[cta, place] = value


def shares_of(lengths: list[int], ctas: int, **flags: int) -> list[list[int]]:
    """Pages, request and first page of every CTA."""
    kernel = Shares(**flags)
    specs = (TensorSpec("lengths", "i32", (None,), align=4), TensorSpec("told", "i32", (None, 3)))
    program = parse(ptx_of(compile_kernel(kernel, specs, "sm_90a", keep_ptx=True)))
    given = torch.tensor(lengths, dtype=torch.int32)
    told = torch.full((ctas, 3), -1, dtype=torch.int32)
    parameters = packed([(given, given.shape), (told, [ctas])])
    run([Launch(program, (ctas, 1, 1), parameters, [given, told])])
    return told.tolist()


def pages_of(lengths: list[int]) -> list[tuple[int, int]]:
    """The list that is shared: request and page, one behind the other."""
    return [
        (request, page)
        for request, length in enumerate(lengths)
        for page in range(-(-min(length, REACH) // PAGE))
    ]


def taken(share: list[int], lengths: list[int]) -> list[tuple[int, int]]:
    """The pages of a share, walked over the ends of requests."""
    count, request, page = share
    found: list[tuple[int, int]] = []
    while len(found) < count:
        pages = -(-min(lengths[request], REACH) // PAGE)
        found += [(request, p) for p in range(page, pages)][: count - len(found)]
        request, page = request + 1, max(page - pages, 0)
    return found


LENGTHS = {
    "one": [4096],
    "ragged": [0, 1, 63, 64, 65, 700, 0, 4096, 5000, 2],
    "many": [i * 37 % 900 for i in range(70)],
    "none": [0, 0],
}


@pytest.mark.parametrize("flags", [{}, {"ahead": 5, "lead": 3}, {"ahead": 20, "lead": 500}])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_every_page_is_taken_once_and_in_order(lengths, flags):
    shares = shares_of(lengths, 12, **flags)
    assert [page for share in shares for page in taken(share, lengths)] == pages_of(lengths)


def test_the_first_ctas_lead():
    total = len(pages_of(LENGTHS["many"]))
    even = [share[0] for share in shares_of(LENGTHS["many"], 12)]
    assert max(even) - min(even) <= 1
    counts = [share[0] for share in shares_of(LENGTHS["many"], 12, ahead=5, lead=30)]
    first, others = counts[:5], counts[5:]
    assert sum(counts) == total
    assert {min(first) - max(others), max(first) - min(others)} <= {29, 30, 31}
    # A list that does not last: nobody leads by more than its equal share would have been.
    short = [share[0] for share in shares_of([640], 4, ahead=1, lead=30)]
    assert short == [4, 2, 2, 2]
