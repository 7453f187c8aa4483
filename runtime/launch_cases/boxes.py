"""Mailboxes of the peers in a launch that is run alone: other buffers of the same device.

A kernel is handed addresses only, so the peers' mailboxes are found again by the table of them that
it was given.  Words that nobody has written hold the sentinel still.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.comm.device_mailbox import TimeoutRecord
from kpipe.runtime.launch_cases.small import DEVICE, Verdict

KEPT = 8
"""Tables whose mailboxes are kept: those of a case and its replay, with some to spare."""


def signed(sentinel: int) -> int:
    """The int32 with the bits of a 32-bit sentinel."""
    return sentinel - (1 << 32) if sentinel >> 31 else sentinel


def armed(shape: tuple[int, ...], dtype: torch.dtype, sentinel: int) -> Tensor:
    """A buffer of that shape in which every word is the sentinel."""
    words = (*shape[:-1], shape[-1] * dtype.itemsize // 4)
    filled = torch.full(words, signed(sentinel), dtype=torch.int32, device=DEVICE)
    return filled.view(dtype)


def words_of(tensor: Tensor) -> Tensor:
    """A tensor's bytes as int32 words; a copy where it is strided."""
    return tensor.contiguous().view(torch.int32)


class Boxes:
    """The ranks' mailboxes of the launches of a case."""

    def __init__(self) -> None:
        self._known: dict[int, list[Tensor]] = {}
        self._record: TimeoutRecord | None = None

    def fault(self) -> Tensor:
        """The operand that says where a poll leaves its record."""
        if self._record is None:
            self._record = TimeoutRecord(0, torch.device(DEVICE))
        return self._record.fault

    def time_out(self) -> str:
        """Which poll of the launches so far has given up, also once the device is lost; or ""."""
        error = self._record.error(()) if self._record is not None else None
        return str(error) if error is not None else ""

    def table(
        self, ranks: int, shape: tuple[int, ...], dtype: torch.dtype, sentinel: int, offset: int
    ) -> Tensor:
        """Addresses `offset` bytes behind the beginning of `ranks` new mailboxes."""
        boxes = [armed(shape, dtype, sentinel) for _ in range(ranks)]
        addresses = [box.data_ptr() + offset for box in boxes]
        self._known[addresses[0]] = boxes
        for old in list(self._known)[:-KEPT]:
            del self._known[old]
        return torch.tensor(addresses, dtype=torch.int64, device=DEVICE)

    def of(self, table: Tensor) -> list[Tensor]:
        """The mailboxes behind a table, in the order of the ranks."""
        return self._known[int(table[0])]


def check_place(verdict: Verdict, name: str, box: Tensor, place: tuple, sentinel: int) -> Tensor:
    """What lies at `place` of a mailbox; every word of it was written, and no other was."""
    sent = box[place].clone()
    missing = int((words_of(sent) == signed(sentinel)).sum())
    if missing:
        verdict.wrong.append(f"{name}: {missing} words were not sent")
    rest = box.clone()
    rest[place] = armed((*sent.shape,), sent.dtype, sentinel)
    strays = int((words_of(rest) != signed(sentinel)).sum())
    if strays:
        verdict.wrong.append(f"{name}: {strays} words were sent to another's place")
    return sent


def check_armed(verdict: Verdict, name: str, box: Tensor, sentinel: int) -> None:
    """Every word of what was read is the sentinel again."""
    left = int((words_of(box) != signed(sentinel)).sum())
    if left:
        verdict.wrong.append(f"{name}: {left} words are not re-armed")
