"""Mailboxes: memory that peers write and this rank polls, where the data is its own ready flag.

Every 4-byte word holds the sentinel until its writer has stored something else.  The reader
polls until no word equals the sentinel and afterwards stores the sentinel back (re-arms).
Comparisons are made on bits, never on values: negative zeros, subnormals and NaNs are ordinary
words unless they are the sentinel itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kpipe.runtime.comm.gate import Gate, RankAborted
from kpipe.runtime.comm.word_index import WORD_BYTES, axis_ranges, slices, word_ranges

__all__ = ["Mailbox", "MailboxError", "MailboxSpec", "MailboxTimeout", "RankAborted"]

# Words quoted in a time-out: one 16-byte fragment, the unit in which kernels poll.
_FRAGMENT = 4

# As BF16 a pair with -0, as FP32 -0, as an id that of no candidate.
_LOWEST = -(1 << 31)


class MailboxError(RuntimeError):
    """A mailbox was declared or used against its protocol."""


class MailboxTimeout(MailboxError):
    """Words that a poll waited for did not arrive.

    `mailbox`, `stage`, `rank` say who waited; `peers` are the ranks that have not written (empty
    when the mailbox does not say whose place a word is); `word` is the place of the first missing
    word, its last axis counted in words.
    """

    def __init__(
        self,
        text: str,
        *,
        mailbox: str,
        stage: str,
        rank: int,
        peers: tuple[int, ...],
        word: tuple[int, ...],
    ) -> None:
        super().__init__(text)
        self.mailbox = mailbox
        self.stage = stage
        self.rank = rank
        self.peers = peers
        self.word = word


@dataclass(frozen=True)
class MailboxSpec:
    """Declaration of a mailbox; `shape` is that of one parity on one rank.

    `sentinel` is the 32-bit word that means "not written".  Where `source_axis` is given, place
    `p` of that axis belongs to writer `p // source_stride`; stores are then checked and time-outs
    name the writer.  Rows lie on axis 1 when axis 0 is the source, otherwise on axis 0.  Raises
    MailboxError for a declaration that cannot work.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    sentinel: int
    parities: int = 2
    source_axis: int | None = None
    source_stride: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(self.shape))
        if not self.shape or min(self.shape) < 1:
            raise MailboxError(f"mailbox {self.name}: shape {self.shape} is empty")
        row_bytes = self.shape[-1] * self.dtype.itemsize
        if row_bytes % WORD_BYTES:
            raise MailboxError(
                f"mailbox {self.name}: the last axis has {row_bytes} bytes, "
                f"not whole words of {WORD_BYTES}"
            )
        if not 0 <= self.sentinel <= 0xFFFFFFFF:
            raise MailboxError(f"mailbox {self.name}: sentinel {self.sentinel} is not 32-bit")
        if self.parities < 1:
            raise MailboxError(f"mailbox {self.name}: {self.parities} parities, at least 1")
        axis = self.source_axis
        if axis is not None and not 0 <= axis < len(self.shape):
            raise MailboxError(f"mailbox {self.name}: no axis {axis} in shape {self.shape}")
        if axis is not None and (self.source_stride < 1 or self.shape[axis] % self.source_stride):
            raise MailboxError(
                f"mailbox {self.name}: axis {axis} has {self.shape[axis]} places, "
                f"not a multiple of source_stride {self.source_stride}"
            )

    @property
    def rows_axis(self) -> int:
        """The axis whose size is rows_cap."""
        return 1 if self.source_axis == 0 and len(self.shape) > 1 else 0

    @property
    def signed_sentinel(self) -> int:
        """The sentinel as the int32 value with the same bits."""
        return self.sentinel - (1 << 32) if self.sentinel >= 1 << 31 else self.sentinel

    @property
    def silent_word(self) -> int:
        """An int32 that has come and says nothing: a zero, or the id of no candidate."""
        return 0 if self.signed_sentinel == _LOWEST else _LOWEST

    @property
    def word_shape(self) -> tuple[int, ...]:
        """`shape` with the last axis counted in words."""
        return (*self.shape[:-1], self.shape[-1] * self.dtype.itemsize // WORD_BYTES)

    def armed_words(self) -> torch.Tensor:
        """A new int32 buffer of `word_shape` in which every word is the sentinel."""
        return torch.full(self.word_shape, self.signed_sentinel, dtype=torch.int32)

    def sources(self, ranges: tuple[range, ...]) -> tuple[int, ...]:
        """The writers whose places lie in an element region; empty without `source_axis`."""
        if self.source_axis is None:
            return ()
        places = ranges[self.source_axis]
        return tuple(sorted({place // self.source_stride for place in places}))


def check_sources(spec: MailboxSpec, ranks: int) -> None:
    """Raises MailboxError where a mailbox has places for other writers than `ranks` of them."""
    if spec.source_axis is None:
        return
    writers = spec.shape[spec.source_axis] // spec.source_stride
    if writers != ranks:
        raise MailboxError(
            f"mailbox {spec.name}: axis {spec.source_axis} has places for {writers} ranks, "
            f"the group has {ranks}"
        )


class Mailbox:
    """One rank's end of one parity of a mailbox.

    `words` are the int32 buffers of all ranks, in rank order; `local` is this rank's, in the
    declared shape and dtype.  Indices are tuples of integers, slices and Ellipsis; the last axis
    must be cut on 4-byte words and nothing may reach beyond the shape.
    """

    def __init__(
        self,
        spec: MailboxSpec,
        parity: int,
        rank: int,
        words: list[torch.Tensor],
        gate: Gate,
        *,
        stage: Callable[[], str] = lambda: "",
        refuse_overwrite: bool = True,
    ) -> None:
        self.spec = spec
        self.parity = parity
        self.rank = rank
        self.ranks = len(words)
        self.name = spec.name
        self.shape = spec.shape
        self.dtype = spec.dtype
        self.sentinel = spec.sentinel
        self.local = words[rank].view(spec.dtype)
        self._words = words
        self._gate = gate
        self._stage = stage
        self._refuse_overwrite = refuse_overwrite

    def store(self, peer: int, index: tuple, value: torch.Tensor) -> None:
        """Writes `value` into the buffer of `peer` (this rank included) and wakes pollers.

        `value` has the dtype of the mailbox and the shape of the indexed region; it must have
        been sanitised.  Raises MailboxError, and writes nothing, where a word of it equals the
        sentinel, where the region is another rank's place, and where a word of the region has
        not been re-armed (the reader would lose what is there).
        """
        ranges = self._ranges(index)
        self._check_store(peer, index, ranges, value)
        target = self._words[peer][slices(self._word_ranges(ranges))]
        # A copy: views of one dtype as another need an aligned, contiguous start.
        sent = value.detach().clone().reshape(-1)
        sent = sent.view(torch.int32).reshape(target.shape)
        unsent = (sent == self.spec.signed_sentinel).sum().item()
        if unsent:
            raise MailboxError(
                f"{self._who()}: {unsent} of {sent.numel()} words stored into rank {peer} equal "
                f"the sentinel 0x{self.sentinel:08X}; sanitise the value first"
            )
        with self._gate.writing(self.rank):
            if self._refuse_overwrite:
                unread = (target != self.spec.signed_sentinel).sum().item()
                if unread:
                    raise MailboxError(
                        f"{self._who()}: {unread} of {target.numel()} words in rank {peer} "
                        "are overwritten before rank "
                        f"{peer} has re-armed them"
                    )
            target.copy_(sent)

    def poll(self, index: tuple) -> torch.Tensor:
        """Blocks until no word of `local[index]` is the sentinel and returns that view.

        Raises MailboxTimeout at the group's deadline, or at once when no rank is left that could
        write; RankAborted when another rank fails; MailboxError for a bad index.
        """
        ranges = self._ranges(index)
        places = self._word_ranges(ranges)
        words = self._words[self.rank][slices(places)]
        sentinel = self.spec.signed_sentinel
        self._gate.wait(
            self.rank,
            lambda: not (words == sentinel).any().item(),
            lambda reason: self._timeout(reason, words, places),
        )
        return self.local[index]

    def rearm(self, index: tuple) -> None:
        """Stores the sentinel into every word of `local[index]`; MailboxError for a bad index."""
        places = self._word_ranges(self._ranges(index))
        with self._gate.holding(self.rank):
            self._words[self.rank][slices(places)] = self.spec.signed_sentinel

    def _who(self) -> str:
        stage = self._stage() or "unknown"
        return f"mailbox {self.name}, parity {self.parity}, stage {stage}, rank {self.rank}"

    def _ranges(self, index: tuple) -> tuple[range, ...]:
        try:
            return axis_ranges(index, self.shape, self.spec.rows_axis)
        except ValueError as error:
            raise MailboxError(f"{self._who()}: {error}") from None

    def _word_ranges(self, ranges: tuple[range, ...]) -> tuple[range, ...]:
        try:
            return word_ranges(ranges, self.dtype.itemsize)
        except ValueError as error:
            raise MailboxError(f"{self._who()}: {error}") from None

    def _check_store(
        self, peer: int, index: tuple, ranges: tuple[range, ...], value: torch.Tensor
    ) -> None:
        if not 0 <= peer < self.ranks:
            raise MailboxError(f"{self._who()}: no rank {peer} among {self.ranks}")
        region = tuple(self.local[index].shape)
        if value.dtype != self.dtype or tuple(value.shape) != region:
            raise MailboxError(
                f"{self._who()}: stored {value.dtype} {list(value.shape)}, "
                f"the indexed region is {self.dtype} {list(region)}"
            )
        foreign = [source for source in self.spec.sources(ranges) if source != self.rank]
        if foreign:
            raise MailboxError(
                f"{self._who()}: stores into rank {peer} at the place of rank {foreign[0]}"
            )

    def _timeout(
        self, reason: str, words: torch.Tensor, places: tuple[range, ...]
    ) -> MailboxTimeout:
        """The error for the words of the region at `places` that are still missing."""
        missing = (words == self.spec.signed_sentinel).nonzero()
        word = tuple(part[at] for part, at in zip(places, missing[0].tolist(), strict=True))
        peers = self._missing_sources(missing, places)
        row = self._words[self.rank][word[:-1]]
        first = word[-1] // _FRAGMENT * _FRAGMENT
        seen = " ".join(f"0x{w & 0xFFFFFFFF:08X}" for w in row[first : first + _FRAGMENT].tolist())
        text = (
            f"{self._who()}: {_absent(peers)} ({reason}); first missing word {word}, "
            f"{len(missing)} of {words.numel()} missing; "
            f"expected anything but 0x{self.sentinel:08X}, saw {seen}"
        )
        return MailboxTimeout(
            text, mailbox=self.name, stage=self._stage(), rank=self.rank, peers=peers, word=word
        )

    def _missing_sources(self, missing: torch.Tensor, places: tuple[range, ...]) -> tuple[int, ...]:
        axis = self.spec.source_axis
        if axis is None:
            return ()
        found = [places[axis][at] for at in missing[:, axis].unique().tolist()]
        if axis == len(places) - 1:
            found = [place * WORD_BYTES // self.dtype.itemsize for place in found]
        return tuple(sorted({place // self.spec.source_stride for place in found}))


def _absent(peers: tuple[int, ...]) -> str:
    if not peers:
        return "a peer has not written"
    if len(peers) == 1:
        return f"rank {peers[0]} has not written"
    return f"ranks {', '.join(map(str, peers))} have not written"
