"""Random inputs and oracle of the kernel that sums the ranks' output projections; see exchange.py.

Sums in the order of the ranks, and what is added behind them, are judged bit by bit.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.boxes import Boxes, armed, check_armed, check_place
from kpipe.runtime.launch_cases.exchange import NEGATIVE_ZERO, bits, positive_zeros
from kpipe.runtime.launch_cases.small import DEVICE, NAN, Verdict, noise

LARGE = 2.0**20


class OReduceCase:
    """Sums of the ranks' partials, alone or on top of the residual stream."""

    class_name, outputs = "OReduce", ("o_mail", "out", "o_gather")
    variants = ({}, {"two_shot": True}, {"add_prefix": True})
    judged_flags = ("two_shot", "add_prefix", "rank")
    queries = (1,)

    def __init__(self, module: ModuleType):
        self.module = module
        self.boxes = Boxes()
        self.flags: dict[str, object] = {}

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        two_shot, rank = bool(self.flags.get("two_shot")), int(self.flags.get("rank", 0))
        columns = slice(rank * m.OWNED, (rank + 1) * m.OWNED) if two_shot else slice(None)
        mail = armed((m.RANKS, m.ROWS_CAP, m.HIDDEN), torch.bfloat16, NEGATIVE_ZERO)
        here = mail[:, :rows, columns]
        here.copy_(self._partials(here.shape))
        gather = (m.ROWS_CAP, m.HIDDEN)
        return {
            "o_mail": mail[:, :rows],
            "out": torch.full((rows, m.HIDDEN), NAN, device=DEVICE).bfloat16(),
            "o_gather": positive_zeros(noise(rows, m.HIDDEN)),
            "o_gather_peers": self.boxes.table(
                m.RANKS, gather, torch.bfloat16, NEGATIVE_ZERO, rank * m.OWNED * 2
            ),
            "prefix": self._stream(rows),
            "fault": self.boxes.fault(),
        }

    def _partials(self, shape: torch.Size) -> Tensor:
        """Partials without negative zeros, of very different sizes."""
        scales = torch.exp(3 * torch.randn(*shape[:2], 1, device=DEVICE)).bfloat16()
        values = noise(*shape) * scales
        values[:, :, ::7] = 0
        # Cancels at once in the order of the ranks, and loses what another order adds first.
        values[0, :, 1::7] = LARGE
        values[-1 if self.module.RANKS < 3 else 1, :, 1::7] = -LARGE
        return positive_zeros(values)

    def _stream(self, rows: int) -> Tensor:
        """A residual stream of the size of the sums: who rounds them once only is seen."""
        stream = noise(rows, self.module.HIDDEN, scale=4.0)
        stream[:, ::5] = 0
        return stream

    def check(
        self,
        given: dict[str, Tensor],
        done: dict[str, Tensor],
        q: int,
        two_shot: bool,
        add_prefix: bool,
        rank: int,
    ) -> Verdict:
        m, verdict = self.module, Verdict()
        rows = done["out"].shape[0]
        check_armed(verdict, "o_mail", done["o_mail"], NEGATIVE_ZERO)
        total = given["o_mail"][0].float()
        for source in range(1, m.RANKS):
            total = total + given["o_mail"][source].float()
        summed = total.bfloat16()
        reduced = given["o_gather"] if two_shot else summed
        stream = given["prefix"].float() + reduced.float() if add_prefix else reduced
        verdict.equal("out", bits(done["out"]), bits(stream.bfloat16()))
        if not two_shot:
            return verdict
        check_armed(verdict, "o_gather", done["o_gather"], NEGATIVE_ZERO)
        place = (slice(0, rows), slice(rank * m.OWNED, (rank + 1) * m.OWNED))
        for peer, box in enumerate(self.boxes.of(done["o_gather_peers"])):
            sent = check_place(verdict, f"o_gather of rank {peer}", box, place, NEGATIVE_ZERO)
            verdict.equal("sums", bits(sent), bits(positive_zeros(summed[place])))
        return verdict


CASES = {"o_reduce": OReduceCase}
