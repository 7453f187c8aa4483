"""Rank 0 of a layer that exchanges words, alone: what its peers would have sent is made up.

Kernels for every rank would take longer to compile than everything that is measured, so nobody runs
but rank 0.  Activations of a peer are random and, where a sum takes them, small, so that what rank
0 adds stays visible.  Candidates decide how many keys rank 0 attends to, so a peer's are those that
rank 0 itself has sent, under the peer's ids and with scores in between: its share of the best keys
is a rank's, and the search for the last of them takes what it takes among different scores.

Rank 0's own places are armed: it finds there what it stores itself.  Only where a launch runs
without the one that stores do words come into them too.  What rank 0 sends goes into mailboxes that
nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kpipe.runtime.bench_inputs import TimedLayer
from kpipe.runtime.comm.device_ranks import DeviceComm, DeviceRanks
from kpipe.runtime.comm.mailbox import MailboxSpec, MailboxTimeout
from kpipe.runtime.comm.sanitise import EMPTY_ID
from kpipe.runtime.comm.virtual_ranks import VirtualRanks
from kpipe.runtime.comm.word_index import slices, word_ranges
from kpipe.runtime.layer import Layer
from kpipe.runtime.rows import row_lengths
from kpipe.runtime.sharding import Shard

NOTE = "peer stores stay on this GPU: no NVLink in these times, and no rank is late"
PARITIES = 2
SMALL = 2.0**-6
FP8_SCALE = 50.0  # as `bench_inputs.fill` has it: one over what a value is multiplied with


class Peers:
    """The mailboxes of rank 0 for `layers` layers of one graph, and what comes into them.

    No two of these layers share a mailbox; `backend` as of `Layer.prepare`.
    """

    def __init__(
        self, layer_class: type[Layer], layers: int, device: str, backend: str = "cuda"
    ) -> None:
        ranks = layer_class.RANKS
        self.shard = Shard(0, ranks, layer_class.INTERLEAVE)
        count = -(-layers // PARITIES)
        if backend == "cuda":
            self._groups: list[Any] = [DeviceRanks(ranks, device) for _ in range(count)]
            self._comms = [alone(group) for group in self._groups]
        else:
            self._groups = [_host_ranks(ranks) for _ in range(count)]
            self._comms = [group.rank(0) for group in self._groups]
        self._specs = tuple(layer_class.MEMORY.mailboxes.values())
        self._boxes = [
            [self.comm(layer).mailbox(spec, layer % spec.parities) for spec in self._specs]
            for layer in range(layers)
        ]
        self._words: dict[tuple[int, ...], list[dict[str, Tensor]]] = {}

    def comm(self, layer: int) -> Any:
        """Rank 0's end of the group that the layer of that number exchanges words with."""
        return self._comms[layer // PARITIES]

    def forget(self) -> None:
        """The next layers work on other inputs: their words are made anew."""
        self._words.clear()

    def words(self, layers: Sequence[TimedLayer], own: bool = False) -> Callable[[], None]:
        """What brings the words of a step to the first layers, which are given, in stream order.

        With `own` rank 0's own words as well, for runs that leave out launches which store them.
        Made when so many layers of its lengths are met for the first time, by running `layers`
        once; kept for all other candidates.  Raises what that run raises.
        """
        one = layers[0]
        key = (len(layers), *one.step.lengths.tolist())
        rows = one.layer.declared_rows(one.step)
        if key not in self._words:
            self._words[key] = self._made(layers, rows)
        return partial(self._bring, self._words[key], rows, own)

    def timeouts(self) -> list[MailboxTimeout]:
        """What is known of polls on a device that have given up."""
        on_device = [group for group in self._groups if isinstance(group, DeviceRanks)]
        return [error for group in on_device for error in group.timeouts()]

    def _bring(self, words: Sequence[Mapping[str, Tensor]], rows: int, own: bool) -> None:
        for boxes, of_layer in zip(self._boxes[: len(words)], words, strict=True):
            bring(of_layer, boxes, rows, own)

    def _made(self, layers: Sequence[TimedLayer], rows: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator(layers[0].step.hidden.device).manual_seed(1)
        drawn = {spec.name: random_words(spec, generator) for spec in self._specs}
        self._bring([drawn for _ in layers], rows, own=False)
        found = []
        for number, one in enumerate(layers):
            one.run()
            visible = row_lengths(one.step.lengths, one.step.q)
            found.append({**drawn, **self._candidates(number, drawn, visible)})
        return found

    def _candidates(
        self, layer: int, drawn: Mapping[str, Tensor], visible: Tensor
    ) -> dict[str, Tensor]:
        """The words of all mailboxes of candidates, after what rank 0 has sent to its last peer:
        every layer's scores are its own, and a rank's share depends on how its peers' lie."""
        last = self._groups[layer // PARITIES].rank(self.shard.ranks - 1)
        found = {}
        for spec in self._specs:
            if spec.dtype.is_floating_point:
                continue
            sent = last.mailbox(spec, layer % spec.parities).local[0, : visible.numel()]
            words = drawn[spec.name].clone()
            words[0, : visible.numel()] = sent
            for rank in range(1, self.shard.ranks):
                words[rank, : visible.numel()] = candidates_of(rank, sent, self.shard, visible)
            found[spec.name] = words
        return found


class Box(Protocol):
    """One parity of a mailbox of rank 0, on a device or on the host."""

    name: str
    spec: MailboxSpec
    local: Tensor


def bring(words: Mapping[str, Tensor], boxes: Iterable[Box], rows: int, own: bool) -> None:
    """The first `rows` rows of `words` come into these mailboxes, in stream order.

    Without `own` rank 0's places are armed instead.
    """
    for box in boxes:
        axis, spec = box.spec.rows_axis, box.spec
        target = box.local.view(torch.int32).narrow(axis, 0, rows)
        target.copy_(words[box.name].narrow(axis, 0, rows))
        if not own and spec.source_axis is not None:
            target[own_place(spec)].fill_(spec.signed_sentinel)


def own_place(spec: MailboxSpec) -> tuple[slice, ...]:
    """Where rank 0 stores among the words of a mailbox, which has places for writers."""
    places = [range(size) for size in spec.shape]
    places[spec.source_axis] = range(spec.source_stride)
    return slices(word_ranges(tuple(places), spec.dtype.itemsize))


def alone(group: DeviceRanks) -> DeviceComm:
    """Rank 0 of a group, driven as if it had this GPU to itself: its launches are whole."""
    comm = group.rank(0)
    comm.in_halves = False
    return comm


def _host_ranks(ranks: int) -> VirtualRanks:
    """A group on the host of which rank 0 alone runs: a word that is not there never comes."""
    group = VirtualRanks(ranks, refuse_overwrite=False)  # its peers re-arm nothing
    group.gate.start((0,))
    return group


def random_words(spec: MailboxSpec, generator: torch.Generator) -> Tensor:
    """int32 words of a mailbox, none of them the sentinel.

    Candidates are none: their words say nothing.
    """
    words = torch.full(spec.word_shape, spec.silent_word, dtype=torch.int32)
    words = words.to(generator.device)
    if spec.dtype.is_floating_point:
        scale = FP8_SCALE if spec.dtype.itemsize == 1 else SMALL
        values = torch.randn(spec.shape, generator=generator, device=generator.device) * scale
        drawn = values.clamp_(-448, 448).to(spec.dtype).view(torch.int32)
        words = torch.where(drawn == spec.signed_sentinel, words, drawn)
    return words


def candidates_of(rank: int, sent: Tensor, shard: Shard, visible: Tensor) -> Tensor:
    """What `rank` sends in place of rank 0's candidates `sent` [rows, top_k, 2] i32.

    The keys at the same places of its own share, as far as they are among the first `visible`
    [rows] of the context; a score lies between rank 0's and its next lower one, so that no two of
    all ranks' scores are equal where rank 0's are not, but for the lowest.
    """
    scores, ids = sent[..., 0].view(torch.float32), sent[..., 1]
    moved = ids + rank * shard.interleave
    there = (ids >= 0) & (moved < visible[:, None])  # no id is negative
    ordered, places = scores.sort(dim=-1, descending=True)
    below = torch.cat([ordered[:, 1:], ordered[:, -1:]], dim=-1)
    steps = torch.where(ordered.isfinite() & below.isfinite(), ordered - below, 0.0)
    between = ordered - steps * (rank / shard.ranks)
    scores = torch.empty_like(ordered).scatter_(-1, places, between)
    bits = torch.where(there, scores, -torch.inf).view(torch.int32)
    return torch.stack([bits, torch.where(there, moved, EMPTY_ID)], dim=-1)
