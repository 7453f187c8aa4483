"""Random inputs and oracle of the kernel that sums the ranks' output projections; see exchange.py.

Sums in the order of the ranks, and what is added behind them, are judged bit by bit; AttnRes in
float64.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.boxes import Boxes, armed, check_armed, check_place
from kpipe.runtime.launch_cases.exchange import NEGATIVE_ZERO, bits, positive_zeros
from kpipe.runtime.launch_cases.small import BF16_UNIT, DEVICE, NAN, Verdict, noise
from kpipe.runtime.metadata import MOST_SAVED
from kpipe.runtime.oracle.residual import MixWeights, attn_res, mix_shares

LARGE = 2.0**20
BESIDE = 2
"""Rows of a saved block behind those of the launch."""


class OReduceCase:
    """Sums of the ranks' partials, alone or on top of the residual stream, or mixed with blocks."""

    class_name, outputs = "OReduce", ("o_mail", "out", "o_gather", "new_prefix")
    variants = ({}, {"two_shot": True}, {"add_prefix": True}, {"mix_blocks": True})
    judged_flags = ("two_shot", "add_prefix", "mix_blocks", "round_mix", "rank")
    queries = (1,)

    def __init__(self, module: ModuleType):
        self.module = module
        self.boxes = Boxes()
        self.flags: dict[str, object] = {}
        self.blocks = int(torch.randint(MOST_SAVED + 1, ()))

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
            "saved": self._saved(rows),
            "mix_norm": 1 + noise(m.HIDDEN, scale=0.1),
            "mix_query": noise(m.HIDDEN, scale=2 * m.HIDDEN**-0.5),
            "out_norm": 1 + noise(m.HIDDEN, scale=0.1),
            "new_prefix": torch.full((rows, m.HIDDEN), NAN, device=DEVICE).bfloat16(),
            "fault": self.boxes.fault(),
        }

    def _saved(self, rows: int) -> Tensor:
        """Saved blocks of very different sizes, among NaN in rows and blocks that are not there."""
        whole = (MOST_SAVED, rows + BESIDE, self.module.HIDDEN)
        storage = torch.full(whole, NAN, device=DEVICE).bfloat16()
        saved = storage[: self.blocks, :rows]
        scales = torch.exp(2 * torch.randn(self.blocks, rows, 1, device=DEVICE)).bfloat16()
        return saved.copy_(noise(*saved.shape) * scales)

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
        mix_blocks: bool,
        round_mix: str,
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
        if mix_blocks:
            verdict.equal("new_prefix", bits(done["new_prefix"]), bits(stream.bfloat16()))
            self._check_mixed(given, done, stream.bfloat16(), round_mix == "bf16", verdict)
        else:
            verdict.equal("out", bits(done["out"]), bits(stream.bfloat16()))
        if not two_shot:
            return verdict
        check_armed(verdict, "o_gather", done["o_gather"], NEGATIVE_ZERO)
        place = (slice(0, rows), slice(rank * m.OWNED, (rank + 1) * m.OWNED))
        for peer, box in enumerate(self.boxes.of(done["o_gather_peers"])):
            sent = check_place(verdict, f"o_gather of rank {peer}", box, place, NEGATIVE_ZERO)
            verdict.equal("sums", bits(sent), bits(positive_zeros(summed[place])))
        return verdict

    def _check_mixed(self, given, done, stream: Tensor, rounds: bool, verdict: Verdict) -> None:
        """`out` against AttnRes in float64; FP32 errs by a part of what is mixed."""
        eps, saved = self.module.RMS_EPS, given["saved"]
        weights = MixWeights(given["mix_norm"], given["mix_query"], given["out_norm"])
        expected = attn_res(saved, stream, weights, eps, rounds)
        shares = mix_shares(saved, stream, weights, eps)[..., None]
        vectors = torch.cat([saved, stream[None]]).double()
        scale = ((shares * vectors).sum(0).square().mean(1, keepdim=True) + eps).rsqrt()
        mass = (shares * vectors.abs()).sum(0) * scale * weights.out_norm.double().abs()
        steps = 2 if rounds else 1  # a mixture may be rounded the other way
        verdict.within("out", done["out"], expected, mass * 2.0**-6, steps * BF16_UNIT * 1.01)


CASES = {"o_reduce": OReduceCase}
