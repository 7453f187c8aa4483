"""What the tests of whole layers share: context lengths, and judging a trial."""

from __future__ import annotations

from collections.abc import Sequence

from kpipe.runtime.compare import StageError, compare_trial
from kpipe.runtime.trial import Trial

PAGE = 64
TOP_K = 16  # of the small geometry

# Around everything that a length can be around: nothing, one key, fewer keys than the rows of a
# verify step, top_k, a page, two pages, the whole context.
EDGES = (70, 0, 1, 15, 16, 17, 3, 63, 64, 65, 5, 127, 128, 129, 2, 200, 33, 512)


def lengths(requests: int, first: int = 0) -> tuple[int, ...]:
    """That many lengths, taken from EDGES in a circle."""
    return tuple(EDGES[(first + place) % len(EDGES)] for place in range(requests))


def assert_within_bounds(trials: Sequence[Trial]) -> list[StageError]:
    """Every stage of every layer is within its declared bound; returns the comparisons."""
    errors = [(n, error) for n, trial in enumerate(trials) for error in compare_trial(trial)]
    beyond = [
        f"layer {n}, {e.stage} {e.what}, rank {e.rank}: {e.error:.2e} > {e.bound:.2e} ({e.reason})"
        for n, e in errors
        if not e.ok
    ]
    assert not beyond, "\n".join(beyond)
    return [error for _, error in errors]


def compared(errors: Sequence[StageError]) -> set[str]:
    """What was compared, as "stage what"."""
    return {f"{error.stage} {error.what}" for error in errors}
