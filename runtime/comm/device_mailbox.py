"""A mailbox as kernels see it: this rank's memory, and where its share lies in every rank's.

Kernels know nothing but addresses, so it is the same to them whether the ranks are streams of one
device or processes on several.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kpipe.runtime.comm.mailbox import MailboxSpec, MailboxTimeout
from kpipe.runtime.comm.word_index import WORD_BYTES

RECORD_WORDS = 8
"""Words of the record that a poll leaves when it gives up: the stage, the address of what it has
read last (low and high word), a word of padding, and the four words that it has seen there."""
STAGES = (
    "mla_query",
    "query_wait",
    "topk_merge",
    "dcp_value",
    "o_reduce",
    "dcp_value_projected",
)
"""Ops that poll; a record holds the place in this list, counted from 1."""
_FRAGMENT_WORDS = 4
_WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class DeviceMailbox:
    """One rank's end of one parity of a mailbox in device memory.

    `local` is this rank's buffer in the declared shape and dtype, every word of it the sentinel
    until a peer writes.  `peers` [ranks] int64: the address, in every rank's buffer, of the places
    that belong to this rank.  `fault` [1] int64: the address of the record that a poll leaves
    when it gives up.
    """

    spec: MailboxSpec
    parity: int
    rank: int
    ranks: int
    local: Tensor
    peers: Tensor
    fault: Tensor

    @property
    def name(self) -> str:
        """The name of the mailbox."""
        return self.spec.name

    def operands(self, rows: int) -> dict[str, Tensor]:
        """What kernels take of it for a step of `rows` rows, by the names of their operands.

        The buffer is cut to the rows; FP8 travels as bytes.  Raises ValueError for more rows than
        the mailbox holds.
        """
        axis = self.spec.rows_axis
        if rows > self.spec.shape[axis]:
            raise ValueError(
                f"mailbox {self.name}: {rows} rows, it holds {self.spec.shape[axis]} of them"
            )
        local = self.local.narrow(axis, 0, rows)
        if local.dtype == torch.float8_e4m3fn:
            local = local.view(torch.uint8)
        return {self.name: local, f"{self.name}_peers": self.peers, "fault": self.fault}


def own_offset(spec: MailboxSpec, rank: int) -> int:
    """Bytes from the beginning of a buffer to the first place that belongs to `rank`."""
    if spec.source_axis is None:
        return 0
    stride = spec.dtype.itemsize
    for size in spec.shape[spec.source_axis + 1 :]:
        stride *= size
    return rank * spec.source_stride * stride


def peer_table(spec: MailboxSpec, rank: int, bases: Iterable[int], device: torch.device) -> Tensor:
    """The table of addresses of one rank; `bases` are those of all ranks' buffers, in order.

    Raises ValueError where a buffer or this rank's share begins off a fragment of 16 bytes.
    """
    offset = own_offset(spec, rank)
    addresses = [base + offset for base in bases]
    grain = min(WORD_BYTES * _FRAGMENT_WORDS, spec.shape[-1] * spec.dtype.itemsize & -16 or 4)
    if any(address % grain for address in addresses):
        raise ValueError(
            f"mailbox {spec.name}: the share of rank {rank} begins off a boundary of {grain} bytes"
        )
    return torch.tensor(addresses, dtype=torch.int64, device=device)


class TimeoutRecord:
    """Where the kernels of one rank write which word they have waited for in vain.

    Pinned memory of the host: it can be read when the device has given up its context.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.words = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        # Pinned memory has the same address on the host and on the device.
        self.fault = torch.tensor([self.words.data_ptr()], dtype=torch.int64, device=device)

    def error(self, boxes: Iterable[DeviceMailbox]) -> MailboxTimeout | None:
        """What the record says of `boxes`, all of this rank; None where no poll has given up."""
        number, low, high, _, *seen = (word & _WORD for word in self.words.tolist())
        if not number:
            return None
        stage = STAGES[number - 1]
        address = high << 32 | low
        for box in boxes:
            start = box.local.data_ptr()
            if start <= address < start + box.local.numel() * box.local.element_size():
                return _timeout(box, stage, (address - start) // WORD_BYTES, seen)
        shown = " ".join(f"0x{value:08X}" for value in seen)
        text = f"stage {stage}, rank {self.rank}: waited at 0x{address:X} in vain, saw {shown}"
        return MailboxTimeout(text, mailbox="", stage=stage, rank=self.rank, peers=(), word=())


def _timeout(box: DeviceMailbox, stage: str, fragment: int, seen: list[int]) -> MailboxTimeout:
    """The error for a fragment, `fragment` words behind the beginning, seen as four words."""
    spec = box.spec
    missing = next((n for n, word in enumerate(seen) if word == spec.sentinel), 0)
    word = _place(fragment + missing, spec.word_shape)
    peers: tuple[int, ...] = ()
    if spec.source_axis is not None:
        at = word[spec.source_axis]
        if spec.source_axis == len(word) - 1:
            at = at * WORD_BYTES // spec.dtype.itemsize
        peers = (at // spec.source_stride,)
    who = f"rank {peers[0]} has not written" if peers else "a peer has not written"
    shown = " ".join(f"0x{value:08X}" for value in seen)
    text = (
        f"mailbox {spec.name}, parity {box.parity}, stage {stage}, rank {box.rank}: {who}; "
        f"first missing word {word}; expected anything but 0x{spec.sentinel:08X}, saw {shown}"
    )
    return MailboxTimeout(
        text, mailbox=spec.name, stage=stage, rank=box.rank, peers=peers, word=word
    )


def _place(word: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place: list[int] = []
    for size in reversed(shape):
        word, at = divmod(word, size)
        place.insert(0, at)
    return tuple(place)
