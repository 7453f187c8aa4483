"""How large a step is, and whether the layer was generated for it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kpipe.runtime.engine.handed import Handed, Source, describe
from kpipe.runtime.layer import Layer
from kpipe.runtime.metadata import LayerError

ELSEWHERE = "run this step through the engine's own attention"


@dataclass(frozen=True)
class Extent:
    """Rows of a step: `requests` real ones of `q` rows each, in a step of `step_rows` rows.

    Rows behind the real ones are padding.  Counts are the host's, so that they are also those of a
    captured step.
    """

    requests: int
    q: int
    step_rows: int

    @property
    def rows(self) -> int:
        """Token rows of the real requests."""
        return self.requests * self.q

    @property
    def step_requests(self) -> int:
        """Requests of the step, padding included."""
        return self.step_rows // self.q


def extent_of(
    source: Source, layer: Layer, requests: int, q: int, hidden: Tensor, padded: bool
) -> Extent:
    """The extent of a step of `requests` requests, with `padded` of all rows of `hidden`.

    Raises LayerError for an empty step, for q or rows that the layer does not declare, and for
    hidden states that are too few or, padded, no multiple of q.
    """
    rows = requests * q
    if rows < 1:
        raise source.refusal("the batch", f"of {requests} requests", "leave the layer out")
    if hidden.shape[0] < rows:
        raise source.refusal(
            "hidden", describe(hidden), f"the metadata counts {rows} rows: hand in both of one step"
        )
    step_rows = hidden.shape[0] if padded else rows
    if step_rows % q:
        raise source.refusal("hidden", describe(hidden), f"pad to a multiple of {q} rows a request")
    try:
        layer.declared_rows_of(step_rows, q)
    except LayerError as error:
        seen = f"of {step_rows} rows, {q} a request"
        said = str(error).removeprefix(f"{layer.NAME}: ")
        raise source.refusal(
            "the step", seen, f"{said}: {ELSEWHERE}, or declare it under rows and generate"
        ) from None
    return Extent(requests, q, step_rows)


def check_longest(source: Source, layer: Layer, attribute: str, longest: int | None) -> None:
    """Raises LayerError where contexts of `longest` tokens do not fit the layer's scores.

    `longest` is an upper bound that the host knows; None leaves the check out.  Of ranks that share
    a context, all judge by the largest share, so that none runs a step that another refuses.
    """
    scores = layer.MEMORY.buffers.get("scores")
    if longest is None or scores is None or not isinstance(scores.shape[-1], int):
        return
    if layer.shard.local_length(longest, rank=0) > scores.shape[-1]:
        raise source.refusal(
            attribute,
            longest,
            f"the layer is generated for contexts of {scores.shape[-1]}: lower the engine's "
            "longest context, or raise `context` in the geometry and generate",
        )


def check_reach(
    source: Source, layer: Layer, table: Handed, page: int, longest: int | None
) -> None:
    """Raises LayerError where a table of pages of `page` tokens ends ahead of `longest` tokens."""
    if longest is None:
        return
    pages = table.tensor.shape[1]
    needed = layer.shard.local_length(longest, rank=0)
    if pages * page < needed:
        raise source.refusal(
            table.attribute,
            describe(table.tensor),
            f"{pages} pages of {page} tokens do not hold a context of {needed}: hand in the table "
            "of this rank at its full width",
        )
