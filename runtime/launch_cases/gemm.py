"""Random inputs and oracles of the weight-streaming products.

Every product is judged in float64 from its BF16 inputs: y = x . W^T, rounded to BF16 once.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.small import BF16_UNIT, DEVICE, NAN, Verdict, noise


class GemmCase:
    """y[rows, outputs] = BF16(x[rows, inputs] . w[outputs, inputs]^T)."""

    queries = (1,)
    variants = tuple({"tokens": tokens} for tokens in (8, 16, 32, 64))

    def __init__(self, module: ModuleType):
        self.module = module
        self.x, self.w, self.y = (spec.name for spec in module.operands())

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        _, weights, _ = self.module.operands()
        outputs, columns = weights.shape
        scale = 10.0 ** float(torch.empty(1).uniform_(-2, 2))
        return {
            self.x: noise(rows, columns, scale=scale),
            self.w: noise(outputs, columns, scale=columns**-0.5),
            self.y: torch.full((rows, outputs), NAN, dtype=torch.bfloat16, device=DEVICE),
        }

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        x, w = given[self.x].double(), given[self.w].double()
        expected, mass = x @ w.T, x.abs() @ w.abs().T
        verdict = Verdict()
        # One rounding to BF16, and FP32 sums whose error is far below 2^-20 of the mass.
        verdict.within(self.y, done[self.y], expected, mass * 2.0**-12, BF16_UNIT * 1.01)
        return verdict


class PackedGemmCase(GemmCase):
    """projected = BF16(hidden . packed^T); without the gate its columns are left alone."""

    class_name, outputs = "PackedGemm", ("projected",)
    judged_flags = ("without_gate",)

    def check(
        self, given: dict[str, Tensor], done: dict[str, Tensor], q: int, without_gate: bool = False
    ) -> Verdict:
        if not without_gate:
            return super().check(given, done, q)
        first, behind = self.module.GATE_COLUMN, self.module.GATE_COLUMN + self.module.GATE
        kept = torch.ones(done[self.y].shape[1], dtype=torch.bool, device=DEVICE)
        kept[first:behind] = False
        made = {**done, self.y: done[self.y][:, kept]}
        verdict = super().check({**given, self.w: given[self.w][kept]}, made, q)
        if not bool(done[self.y][:, first:behind].isnan().all()):
            verdict.wrong.append(f"{self.y}: the columns of the gate were written")
        return verdict


class GateGemmCase(GemmCase):
    """gate = BF16(hidden . packed[gate]^T), columns of a packed row whose others are left alone."""

    class_name, outputs = "GateGemm", ("gate",)

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        given = super().inputs(rows, q)
        packed_rows = torch.full((rows, m.PITCH), NAN, dtype=torch.bfloat16, device=DEVICE)
        given[self.y] = packed_rows[:, m.GATE_COLUMN : m.GATE_COLUMN + m.OUTPUTS]
        return given

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        m = self.module
        part = given[self.w][m.GATE_COLUMN : m.GATE_COLUMN + m.OUTPUTS]
        return super().check({**given, self.w: part}, done, q)


class IndexGemmCase(GemmCase):
    """index_q = BF16(q_c . index_q_b^T)."""

    class_name, outputs = "IndexGemm", ("index_q",)


class OProjCase(GemmCase):
    """out = BF16(gated . o_proj^T)."""

    class_name, outputs = "OProj", ("out",)


CASES = {
    "packed_gemm": PackedGemmCase,
    "gate_gemm": GateGemmCase,
    "index_gemm": IndexGemmCase,
    "o_proj": OProjCase,
}
