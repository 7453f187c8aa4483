"""Random inputs and the oracle of the kernel whose rows travel behind W_UV; see exchange.py."""

from __future__ import annotations

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.exchange import DcpValueCase
from kpipe.runtime.launch_cases.small import BF16_UNIT, NAN, Verdict, noise

_VANISHING = (-(2.0**-120), 2.0**-20)
"""An element and a weight whose product is negative and too small for BF16: a sent -0."""
_NORMAL = 2.0**-120  # below it BF16 has fewer and fewer bits


class DcpValueProjectedCase(DcpValueCase):
    """Every head's row through W_UV to its owner; rows of all sources merged, and gated."""

    class_name = "DcpValueProjected"
    variants = ({}, {"lse_base": "e"})
    judged_flags = ("lse_base",)

    @property
    def width(self) -> int:
        return self.module.V_DIM

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m, given = self.module, super().inputs(rows, q)
        weights = noise(m.GATHERED, m.V_DIM, m.KV_LORA, scale=m.KV_LORA**-0.5)
        partial = noise(rows, m.GATHERED, m.KV_LORA)
        partial[:, -1] = 0.0  # zeros of either sign
        partial[1::2, 0] = 0.0
        partial[1::2, 0, 0], weights[0, :, 0] = _VANISHING
        partial[given["valid"] == 0] = NAN
        new = {"partial": partial, "w_uv": weights}
        named = {"w_uv": "w_uv_all"}  # in the place that the operand has
        return {named.get(name, name): new.get(name, old) for name, old in given.items()}

    def check(
        self, given: dict[str, Tensor], done: dict[str, Tensor], q: int, lse_base: str
    ) -> Verdict:
        merged, magnitude = self._merged(given, lse_base)
        # Two roundings to BF16, and shares that are off by what FP32 keeps of a large LSE.
        bound = 2 * BF16_UNIT * 1.01
        floor = magnitude.flatten(1) * 2.0**-6
        verdict = self.judge(given, done, q, merged.flatten(1), floor, bound)
        self._check_armed(done, verdict)
        self._check_sent(given, done, verdict)
        return verdict

    def _check_sent(self, given, done, verdict: Verdict) -> None:
        filled = (given["valid"] > 0)[:, None, None]
        rows = torch.where(filled, given["partial"].double(), 0.0)
        weights = given["w_uv_all"].double()
        expected = torch.einsum("rhl,hvl->rhv", rows, weights)
        mass = torch.einsum("rhl,hvl->rhv", rows.abs(), weights.abs())
        floor = mass * 2.0**-12 + torch.where(filled, _NORMAL, 0.0)
        for mine, sent in self._rows_sent(given, done, verdict):
            bound = BF16_UNIT * 1.01
            verdict.within("rows sent", sent, expected[:, mine], floor[:, mine], bound)
            negative = (sent.view(torch.int16) == -(2**15)).sum()
            verdict.equal("negative zeros", negative, torch.zeros_like(negative))
        self._check_lse_sent(given, done, verdict)


CASES = {"dcp_value_projected": DcpValueProjectedCase}
