"""The case of every kernel, by its name."""

from __future__ import annotations

from kpipe.runtime.launch_cases import (
    candidates,
    exchange,
    gemm,
    projected,
    query,
    reduce,
    scores,
    select,
    small,
    sparse,
)

CASES = {
    **small.CASES,
    **gemm.CASES,
    **query.CASES,
    **scores.CASES,
    **select.CASES,
    **sparse.CASES,
    **candidates.CASES,
    **reduce.CASES,
    **exchange.CASES,  # in place of those that know no mailboxes
    **projected.CASES,
}
