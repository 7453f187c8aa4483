"""Shares of the pages that the requests of a step see.

The pages of all requests form one list, request after request; each CTA takes a run of it, of
equal length but for one page. Whatever the lengths are, and wherever they are known, the work is
balanced. The first CTAs of the grid may take some pages more than the others, where these wait for
multiprocessors that another grid has. A CTA walks from its first page over the ends of requests:

    number, (count, request, page) = 0, share(...)
    while number < count:
        pages = pages_of(request)
        end = min(pages, page + count - number)   # of this CTA's pages of the request
        ...                                       # page .. end - 1; none where end <= page
        number, request, page = number + max(end - page, 0), request + 1, max(page - pages, 0)
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from kpipe.runtime.sharding import Shard

from . import reduce


def keys_here(visible, shard: Shard) -> Int32:
    """How many of the first `visible` keys of a context this rank holds; 0 where negative."""
    visible = cutlass.max(visible, 0)
    if shard.ranks == 1:
        return visible
    rest = visible % shard.period - shard.rank * shard.interleave
    whole = visible // shard.period * shard.interleave
    return whole + cutlass.min(cutlass.max(rest, 0), shard.interleave)


def pages_of(length, reach, page: int, shard: Shard) -> Int32:
    """Pages of `page` keys that a request of `length` keys sees here, at most `reach` keys."""
    return (cutlass.min(keys_here(length, shard), reach) + page - 1) // page


@cute.jit
def share(
    lengths: cute.Tensor,
    reach,
    page: cutlass.Constexpr,
    shard: cutlass.Constexpr,
    ahead: cutlass.Constexpr = 0,
    lead: cutlass.Constexpr = 0,
):
    """This CTA's share of the list: how many pages, and where its first one is.

    The first `ahead` CTAs have `lead` pages more than the others, or fewer where a list of that
    many pages a CTA does not last.

    The place is a request and a page counted from the first one of that request, which may lie in
    one of the next requests. Each lane counts the pages of a run of requests; all lanes of a warp
    call it together, and every warp gets the same.
    """
    lane = cute.arch.lane_idx()
    requests = lengths.shape[0]
    run = (requests + reduce.WARP - 1) // reduce.WARP
    pages = Int32(0)
    for request in range(lane * run, cutlass.min(lane * run + run, requests)):
        pages = pages + pages_of(lengths[request], reach, page, shard)
    end = reduce.running_sum(pages)
    total = cute.arch.shuffle_sync(end, reduce.WARP - 1)
    cta = cute.arch.block_idx()[0]
    ctas = cute.arch.grid_dim()[0]
    before, more = Int32(0), Int32(0)
    if cutlass.const_expr(ahead):
        lead_here = cutlass.min(total // ctas, lead)
        before = lead_here * cutlass.min(cta, ahead)
        more = lead_here if cta < ahead else Int32(0)
        total = total - lead_here * cutlass.min(ctas, ahead)
    # The first `total % ctas` shares have one page more than the others.
    first = total // ctas * cta + cutlass.min(total % ctas, cta) + before
    count = total // ctas + (1 if cta < total % ctas else 0) + more
    passed = end <= first
    lanes = cute.arch.popc(cute.arch.vote_ballot_sync(passed))
    begin = cute.arch.warp_redux_sync(end if passed else Int32(0), "max")
    return count, lanes * run, first - begin
