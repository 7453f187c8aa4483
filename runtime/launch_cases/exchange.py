"""Random inputs and oracles of the kernels that work on mailboxes; see small.py and boxes.py.

One rank's launch is judged: what it has sent into every rank's mailbox, what it has made of words
that had arrived before it (or arrive while it waits), and that it has re-armed them.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.arrival import Arrival
from kpipe.runtime.launch_cases.boxes import Boxes, armed, check_armed, check_place, words_of
from kpipe.runtime.launch_cases.gemm import GemmCase
from kpipe.runtime.launch_cases.query import MlaQueryCase, MlaQuerySplitCase
from kpipe.runtime.launch_cases.small import (
    BF16_UNIT,
    DEVICE,
    NAN,
    MlaValueCase,
    Verdict,
    noise,
    packed_column,
)

ALL_ONES, NEGATIVE_ZERO = 0xFFFFFFFF, 0x80000000
EMPTY_LSE = -3.0e38
HALVES = 2**16
ROWS_MORE = 3
"""Rows of a mailbox behind those of the launch."""


def some_rank(ranks: int) -> int:
    """Any rank: what it sends may not depend on who it is."""
    return int(torch.randint(ranks, ()))


def halves() -> Tensor:
    """All patterns of 16 bits, as int16."""
    return torch.arange(HALVES, device=DEVICE).to(torch.int16)


def positive_zeros(values: Tensor) -> Tensor:
    """BF16 values whose zeros are +0."""
    return torch.where(values == 0, 0.0, values)


class _SentQuery:
    """What publishing adds to the cases of the query kernels."""

    def __init__(self, module: ModuleType):
        super().__init__(module)
        self.sends = hasattr(module, "RANKS")
        self.boxes = Boxes()
        self.rank = 0

    def _sent(self, operands: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
        """The operands with the mailboxes in place of `query`."""
        if not self.sends:
            return operands
        m = self.module
        query = operands.pop("query")
        self.rank = some_rank(m.RANKS)
        shape = (rows + ROWS_MORE, m.RANKS * m.HEADS, m.LATENT)
        offset = self.rank * m.HEADS * m.LATENT * query.dtype.itemsize
        table = self.boxes.table(m.RANKS, shape, query.dtype, ALL_ONES, offset)
        q_c = {"q_c": operands.pop("q_c")} if "q_c" in operands and "q_a" in operands else {}
        rest = {}
        if hasattr(m, "Q_A_COLUMN"):  # the one that may also wait
            rest = {
                "q_mail": torch.zeros(rows, *shape[1:], dtype=query.dtype, device=DEVICE),
                "fault": self.boxes.fault(),
            }
        return {**operands, "q_mail_peers": table, **q_c, **rest}

    def check_query(self, given, done, q_c: Tensor, verdict: Verdict) -> None:
        """What lies in every rank's mailbox, which is the same in each."""
        if self.sends:
            m, rows = self.module, q_c.shape[0]
            place = (slice(0, rows), slice(self.rank * m.HEADS, (self.rank + 1) * m.HEADS))
            boxes = self.boxes.of(done["q_mail_peers"])
            sent = [
                check_place(verdict, f"mailbox of rank {peer}", box, place, ALL_ONES)
                for peer, box in enumerate(boxes)
            ]
            for peer, rows_there in enumerate(sent):
                verdict.equal(f"query at rank {peer}", words_of(rows_there), words_of(sent[0]))
            done = {**done, "query": sent[0]}
        super().check_query(given, done, q_c, verdict)


class SentMlaQueryCase(_SentQuery, MlaQueryCase):
    """MlaQueryCase, and its heads in every rank's mailbox where it publishes."""

    outputs = ("latent_kv", "query", "q_c")

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        return self._sent(super().inputs(rows, q), rows)


class SentMlaQuerySplitCase(_SentQuery, MlaQuerySplitCase):
    """MlaQuerySplitCase, and its heads in every rank's mailbox where it publishes."""

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        return self._sent(super().inputs(rows, q), rows)


class QueryWaitCase:
    """Every word arrives while the kernel waits, and stays as it is."""

    class_name, outputs = "QueryWait", ()
    variants = ({}, {"ctas": 3})
    queries = (1,)

    def __init__(self, module: ModuleType):
        self.module = module
        self.boxes = Boxes()
        self.arriving = torch.empty(0)

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        spec = self.module.operands()[0]
        dtype = {"u8": torch.uint8, "bf16": torch.bfloat16}[spec.dtype]
        shape = (rows, *spec.shape[1:])
        words = (*shape[:-1], shape[-1] * dtype.itemsize // 4)
        # Any word but the sentinel: its neighbours among them.
        self.arriving = torch.randint(-(2**31), 2**31 - 1, words, device=DEVICE).int()
        self.arriving[self.arriving == -1] = -2
        return {"q_mail": armed(shape, dtype, ALL_ONES), "fault": self.boxes.fault()}

    def arrival(self, live: dict[str, Tensor]) -> Arrival:
        """What lets the words come, once the kernel waits for them."""
        return Arrival(live["q_mail"], self.arriving)

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        verdict = Verdict()
        verdict.equal("words", done["q_mail"].view(torch.int32), self.arriving)
        if note := self.boxes.time_out():
            verdict.wrong.append(note)
        return verdict


class SentOProjCase(GemmCase):
    """BF16(gated . o_proj^T), in `out` or in the mailboxes of the ranks."""

    class_name, outputs = "OProj", ("out",)
    judged_flags: tuple[str, ...] = ()

    def __init__(self, module: ModuleType):
        super().__init__(module)
        self.boxes = Boxes()
        self.sends = hasattr(module, "RANKS")
        self.judged_flags = ("two_shot",) if self.sends else ()
        self.rank = 0

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        if not self.sends:
            return super().inputs(rows, q)
        m = self.module
        x, w, table = m.operands()
        scale = 10.0 ** float(torch.empty(1).uniform_(-2, 2))
        weights = noise(*w.shape, scale=w.shape[1] ** -0.5)
        weights[::5] = 0  # outputs that are zeros of either sign
        self.rank = some_rank(m.RANKS)
        shape = (m.RANKS, rows + ROWS_MORE, m.OUTPUTS)
        offset = self.rank * shape[1] * shape[2] * 2
        return {
            x.name: noise(rows, x.shape[1], scale=scale),
            w.name: weights,
            table.name: self.boxes.table(m.RANKS, shape, torch.bfloat16, NEGATIVE_ZERO, offset),
        }

    def check(
        self, given: dict[str, Tensor], done: dict[str, Tensor], q: int, two_shot: bool = False
    ) -> Verdict:
        if not self.sends:
            return super().check(given, done, q)
        m, verdict = self.module, Verdict()
        x, w = given[self.x].double(), given[self.w].double()
        expected, mass = x @ w.T, x.abs() @ w.abs().T
        owned = m.OUTPUTS // m.RANKS
        for peer, box in enumerate(self.boxes.of(done[self.y])):
            columns = slice(peer * owned, (peer + 1) * owned) if two_shot else slice(None)
            place = (self.rank, slice(0, x.shape[0]), columns)
            sent = check_place(verdict, f"mailbox of rank {peer}", box, place, NEGATIVE_ZERO)
            floor = mass[:, columns] * 2.0**-12
            verdict.within("partial", sent, expected[:, columns], floor, BF16_UNIT * 1.01)
            negative = (sent.view(torch.int16) == -(2**15)).sum()
            verdict.equal("negative zeros", negative, torch.zeros_like(negative))
        return verdict


def bits(values: Tensor) -> Tensor:
    """BF16 values as integers with the same bits."""
    return values.contiguous().view(torch.int16)


class DcpValueCase(MlaValueCase):
    """Rows sent to their owners, rows of all sources merged, W_UV and gate."""

    class_name = "DcpValue"
    outputs = ("gated", "q_mail", "partial_mail", "lse_mail")
    variants = ({"pushes": True}, {}, {"pushes": True, "lse_base": "e"})
    judged_flags = ("pushes", "lse_base")

    def __init__(self, module: ModuleType):
        super().__init__(module)
        self.boxes = Boxes()
        self.rank = 0

    @property
    def width(self) -> int:
        """Elements of a head's row on its way."""
        return self.module.KV_LORA

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        ones = torch.rand(rows, 1, device=DEVICE)
        lengths = torch.randint(q, 4096, (rows // q,), dtype=torch.int32, device=DEVICE)
        lengths[1::3] = 0
        hidden = self._visible(lengths, q) <= 0
        gate = packed_column(rows, m.PITCH, m.GATE_COLUMN, m.HEADS * m.V_DIM, scale=4.0)
        gate[hidden] = NAN
        valid = torch.randint(0, 4, (rows,), dtype=torch.int32, device=DEVICE)
        partial = noise(rows, m.GATHERED, m.KV_LORA)
        partial[:, :, ::9] = torch.where(ones[:, :, None] < 0.5, -0.0, 0.0).bfloat16()
        partial[..., :2] = torch.tensor([0.0, -0.0])  # the sentinel, unless it is cleared
        partial.view(torch.int16).view(-1)[:HALVES] = halves()[: partial.numel()]
        partial[valid == 0] = NAN
        lse = torch.randn(rows, m.GATHERED, device=DEVICE) * 5
        lse[valid == 0] = torch.tensor([NAN, -torch.inf, torch.inf], device=DEVICE)[rows % 3]
        self.rank = some_rank(m.RANKS)
        mail, lse_mail = self._arrived(rows, hidden)
        box = (m.RANKS, m.ROWS_CAP, m.HEADS)
        offset = self.rank * m.ROWS_CAP * m.HEADS
        query = {1: torch.uint8, 2: torch.bfloat16}[m.QUERY_BYTES]
        return {
            "partial": partial,
            "partial_lse": lse,
            "valid": valid,
            "gate": gate,
            "lengths": lengths,
            "w_uv": noise(m.HEADS, m.V_DIM, m.KV_LORA, scale=m.KV_LORA**-0.5),
            "q_mail": torch.zeros(rows, m.GATHERED, m.LATENT, dtype=query, device=DEVICE),
            "partial_mail": mail,
            "partial_mail_peers": self.boxes.table(
                m.RANKS,
                (*box, self.width),
                torch.bfloat16,
                NEGATIVE_ZERO,
                offset * self.width * 2,
            ),
            "lse_mail": lse_mail,
            "lse_mail_peers": self.boxes.table(m.RANKS, box, torch.float32, ALL_ONES, offset * 4),
            "gated": torch.full((rows, m.HEADS * m.V_DIM), NAN, device=DEVICE).bfloat16(),
            "fault": self.boxes.fault(),
        }

    def _arrived(self, rows: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and LSE as the ranks have sent them; some ranks have no key of a row, and no rank
        has one of a hidden row."""
        m = self.module
        mail = armed((m.RANKS, m.ROWS_CAP, m.HEADS, self.width), torch.bfloat16, NEGATIVE_ZERO)
        lse_mail = armed((m.RANKS, m.ROWS_CAP, m.HEADS), torch.float32, ALL_ONES)
        empty = torch.rand(m.RANKS, rows, 1, device=DEVICE) < 0.3
        empty[int(torch.randint(m.RANKS, ()))] = False
        empty |= hidden[None, :, None]
        values = noise(m.RANKS, rows, m.HEADS, self.width)
        sent = torch.where(empty[..., None], 0.0, positive_zeros(values))
        sent[0, :, 0] = NAN  # a rank without weight may have sent anything
        mail[:, :rows] = sent
        lse = torch.randn(m.RANKS, rows, m.HEADS, device=DEVICE) * 4
        lse[:, :, -1] *= 50  # one rank has all the weight
        lse = torch.where(empty, EMPTY_LSE, lse)
        if m.RANKS > 1:
            lse[0, :, 0] = EMPTY_LSE
        else:
            mail[0, :rows, 0] = 1.0
        lse_mail[:, :rows] = lse
        return mail[:, :rows], lse_mail[:, :rows]

    def check(
        self, given: dict[str, Tensor], done: dict[str, Tensor], q: int, pushes: bool, lse_base: str
    ) -> Verdict:
        verdict = Verdict()
        self._check_armed(done, verdict)
        if pushes:
            self._check_sent(given, done, verdict)
        merged, magnitude = self._merged(given, lse_base)
        self._check_gated(given, done, q, merged, magnitude, verdict)
        return verdict

    def _check_armed(self, done: dict[str, Tensor], verdict: Verdict) -> None:
        for name, sentinel in (
            ("q_mail", ALL_ONES),
            ("partial_mail", NEGATIVE_ZERO),
            ("lse_mail", ALL_ONES),
        ):
            check_armed(verdict, name, done[name], sentinel)

    def _merged(self, given: dict[str, Tensor], lse_base: str) -> tuple[Tensor, Tensor]:
        """The arrived rows merged, and what their magnitudes are merged to."""
        lse = given["lse_mail"].double()
        log_two = 1.0 if lse_base == "e" else torch.log(torch.tensor(2.0)).item()
        power = torch.where(lse > EMPTY_LSE, lse * log_two, -torch.inf)
        share = torch.softmax(power, 0).nan_to_num(0.0)[..., None]
        rows_sent = torch.where(share > 0, given["partial_mail"].double(), 0.0)
        return (share * rows_sent).sum(0), (share * rows_sent.abs()).sum(0)

    def _check_sent(self, given, done, verdict: Verdict) -> None:
        filled = (given["valid"] > 0)[:, None, None]
        partial = torch.where(filled, positive_zeros(given["partial"]), 0.0).bfloat16()
        for mine, sent in self._rows_sent(given, done, verdict):
            verdict.equal("rows sent", bits(sent), bits(partial[:, mine]))
        self._check_lse_sent(given, done, verdict)

    def _rows_sent(self, given, done, verdict: Verdict) -> Iterator[tuple[slice, Tensor]]:
        """An owner's heads and the rows that lie at their place in its mailbox, owner by owner."""
        heads, place = self.module.HEADS, (self.rank, slice(0, given["valid"].shape[0]))
        for owner, box in enumerate(self.boxes.of(done["partial_mail_peers"])):
            sent = check_place(verdict, f"rows at rank {owner}", box, place, NEGATIVE_ZERO)
            yield slice(owner * heads, (owner + 1) * heads), sent

    def _check_lse_sent(self, given, done, verdict: Verdict) -> None:
        heads, place = self.module.HEADS, (self.rank, slice(0, given["valid"].shape[0]))
        filled = (given["valid"] > 0)[:, None]
        lse = torch.where(filled, given["partial_lse"], EMPTY_LSE)
        for owner, box in enumerate(self.boxes.of(done["lse_mail_peers"])):
            sent = check_place(verdict, f"LSE at rank {owner}", box, place, ALL_ONES)
            verdict.equal("LSE sent", sent, lse[:, owner * heads : (owner + 1) * heads])

    def _check_gated(
        self, given, done, q: int, merged: Tensor, magnitude: Tensor, verdict: Verdict
    ) -> None:
        w_uv = given["w_uv"].double()
        sigmoid = torch.sigmoid(given["gate"].double())
        value = torch.einsum("rhl,hvl->rhv", merged, w_uv).flatten(1)
        mass = torch.einsum("rhl,hvl->rhv", magnitude, w_uv.abs()).flatten(1)
        sees_keys = (self._visible(given["lengths"], q) > 0)[:, None]
        expected = torch.where(sees_keys, value * sigmoid, 0.0)
        # The merged row is rounded as well: half of BF16_UNIT of its magnitude. The bound is for
        # the two roundings behind it and counts the floor twice.
        floor = torch.where(sees_keys, mass * sigmoid * 0.25 + 1e-30, 0.0)
        verdict.within("gated", done["gated"], expected, floor, 2 * BF16_UNIT * 1.01)
        zero = torch.where(sees_keys, 0, done["gated"].view(torch.int16))
        verdict.equal("rows without keys", zero, torch.zeros_like(zero))


CASES = {
    "mla_query": SentMlaQueryCase,
    "mla_query_split": SentMlaQuerySplitCase,
    "query_wait": QueryWaitCase,
    "o_proj": SentOProjCase,
    "dcp_value": DcpValueCase,
}
