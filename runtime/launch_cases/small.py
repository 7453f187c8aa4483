"""Random inputs and oracles of the generated kernels, written from the maths.

A case builds the operands of one launch (outputs poisoned, NaN in every padded place, strided
views) and judges what a kernel made of them, in float64, or in float32 where bits are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

DEVICE = "cuda"
BF16_UNIT = 2.0**-8  # relative error of one rounding to BF16
E4M3_UNIT = 2.0**-4
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-4
NAN = float("nan")


@dataclass
class Verdict:
    """Worst relative error of a kernel's outputs against a bound, and what was simply wrong."""

    error: float = 0.0
    bound: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def within(self, name: str, actual: Tensor, expected: Tensor, floor: Tensor, bound: float):
        """Records max |actual - expected| / (|expected| + floor); a NaN counts as infinite."""
        error = (actual.double() - expected).abs()
        scale = expected.abs() + floor
        ratio = torch.where(error == 0, 0.0, error / scale.clamp_min(1e-300))
        worst = torch.nan_to_num(ratio, nan=torch.inf).max().item()
        self.error, self.bound = max(self.error, worst), max(self.bound, bound)
        if worst > bound:
            self.wrong.append(f"{name}: error {worst:.3e} over {bound:.3e}")

    def equal(self, name: str, actual: Tensor, expected: Tensor) -> None:
        """Records the number of elements that differ."""
        different = int((actual != expected).sum())
        if different:
            self.wrong.append(f"{name}: {different} of {actual.numel()} elements differ")


def power_of_two_scale(amax: Tensor) -> Tensor:
    """max(amax, floor) / 448 rounded up to a power of two, in the dtype of `amax`."""
    mantissa, exponent = torch.frexp(amax.clamp_min(AMAX_FLOOR) / E4M3_MAX)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(amax), exponent)


def packed_column(rows: int, pitch: int, start: int, width: int, **random) -> Tensor:
    """A column of a packed buffer whose other columns are NaN; a strided [rows, width] view."""
    packed = torch.full((rows, pitch), NAN, dtype=torch.bfloat16, device=DEVICE)
    column = packed[:, start : start + width]
    column.copy_(noise(rows, width, **random))
    return column


def noise(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Fresh normal numbers."""
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


class RmsNormCase:
    """q_c = BF16(x * rsqrt(mean(x^2) + eps) * w)."""

    class_name, outputs = "RmsNorm", ("q_c",)
    variants = ({},)
    queries = (1,)

    def __init__(self, module: ModuleType):
        self.module = module

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        scale = 10.0 ** float(torch.empty(1).uniform_(-2, 2))
        return {
            "q_a": packed_column(rows, m.PITCH, m.Q_A_COLUMN, m.Q_LORA, scale=scale),
            "q_norm": noise(m.Q_LORA) + 1,
            "q_c": torch.full((rows, m.Q_LORA), NAN, dtype=torch.bfloat16, device=DEVICE),
        }

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        x = given["q_a"].double()
        mean = (x * x).mean(1, keepdim=True)
        expected = x * torch.rsqrt(mean + self.module.RMS_EPS) * given["q_norm"].double()
        verdict = Verdict()
        floor = torch.zeros_like(expected)
        verdict.within("q_c", done["q_c"], expected, floor, BF16_UNIT * 1.002)
        return verdict


class DsaIndexCase:
    """Quantised index query, key insert and head weights."""

    class_name, outputs = "DsaIndex", ("index_kv", "index_q8", "index_w")
    variants = ({},)
    queries = (1,)
    key_bound = E4M3_UNIT + 0.01  # half a step, and FP32 noise of the norm near a tie

    def __init__(self, module: ModuleType):
        self.module = module

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        blocks = rows + 2
        between = torch.randint(0, 256, (blocks, 3, m.PAGE * m.TOKEN_BYTES), device=DEVICE)
        cache = between.to(torch.uint8)[:, 1].unflatten(1, (m.PAGE, m.TOKEN_BYTES))
        slots = torch.randperm(blocks * m.PAGE, device=DEVICE)[:rows]
        slots[1::3] = -1
        query = noise(rows, m.INDEX_HEADS, m.INDEX_DIM)
        query *= torch.exp(4 * torch.randn(rows, m.INDEX_HEADS, 1, device=DEVICE)).bfloat16()
        query[:, 0] = 0  # the floor of the scale
        query[:, 1] = query[:, 1].sign() * 448  # a quotient that already is a power of two
        return {
            "index_q": query.flatten(1),
            "wk": packed_column(rows, m.PITCH, m.WK_COLUMN, m.INDEX_DIM),
            "wv": packed_column(rows, m.PITCH, m.WV_COLUMN, m.INDEX_HEADS),
            "index_slots": slots,
            "index_k_norm": noise(m.INDEX_DIM, dtype=torch.float32) + 1,
            "index_k_bias": noise(m.INDEX_DIM, dtype=torch.float32),
            "index_kv": cache,
            "index_q8": torch.full(query.shape, 0xFF, dtype=torch.uint8, device=DEVICE),
            "index_w": torch.full(query.shape[:2], NAN, device=DEVICE),
        }

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        verdict = Verdict()
        self._check_query(given, done, verdict)
        self._check_key(given, done, verdict)
        return verdict

    def _check_query(self, given, done, verdict: Verdict) -> None:
        m = self.module
        query = given["index_q"].float().unflatten(1, (m.INDEX_HEADS, m.INDEX_DIM))
        scale = power_of_two_scale(query.abs().amax(2))
        codes = (query / scale[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
        verdict.equal("index_q8", done["index_q8"], codes)
        constant = m.INDEX_DIM**-0.5 * m.INDEX_HEADS**-0.5
        weights = given["wv"].double() * scale.double() * constant
        verdict.within("index_w", done["index_w"], weights, torch.zeros_like(weights), 1e-6)

    def _check_key(self, given, done, verdict: Verdict) -> None:
        m = self.module
        x = given["wk"].double()
        centred = x - x.mean(1, keepdim=True)
        rr = torch.rsqrt((centred * centred).mean(1, keepdim=True) + m.INDEX_EPS)
        keys = centred * rr * given["index_k_norm"].double() + given["index_k_bias"].double()
        before = given["index_kv"].flatten(1).clone()
        after = done["index_kv"].flatten(1)
        for row, slot in enumerate(given["index_slots"].tolist()):
            if slot < 0:
                continue
            page, token = divmod(slot, m.PAGE)
            at, scale_at = token * m.INDEX_DIM, m.PAGE * m.INDEX_DIM + 4 * token
            codes = after[page, at : at + m.INDEX_DIM]
            scale = after[page, scale_at : scale_at + 4].clone().view(torch.float32).double()
            self._check_scale(keys[row], scale, verdict)
            values = codes.view(torch.float8_e4m3fn).double() * scale
            verdict.within("key", values, keys[row], scale * 2.0**-6, self.key_bound)
            before[page, at : at + m.INDEX_DIM] = codes
            before[page, scale_at : scale_at + 4] = after[page, scale_at : scale_at + 4]
        verdict.equal("bytes of other tokens", after, before)

    def _check_scale(self, key: Tensor, scale: Tensor, verdict: Verdict) -> None:
        """The oracle's scale, or its neighbour where the quotient all but is a power of two."""
        amax = key.abs().amax()
        allowed = {power_of_two_scale(amax * near).item() for near in (1 - 1e-5, 1.0, 1 + 1e-5)}
        if scale.item() not in allowed:
            verdict.wrong.append(f"key scale {scale.item():.3e}, not in {sorted(allowed)}")


class MlaValueCase:
    """gated = BF16(BF16(W_UV . latent) * sigmoid(gate)), zero for rows without keys."""

    class_name, outputs = "MlaValue", ("gated",)
    variants = (
        {},
        {"v_tile": 8},
        {"v_tile": 32},
        {"sigmoid": "exact"},
        {"sigmoid": "fast"},
    )
    queries = (1, 4)

    def __init__(self, module: ModuleType):
        self.module = module

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        lengths, gate, hidden = self.gates(rows, q)
        latent = noise(rows, m.HEADS, m.KV_LORA)
        latent[hidden] = NAN
        return {
            "latent": latent,
            "gate": gate,
            "lengths": lengths,
            "w_uv": noise(m.HEADS, m.V_DIM, m.KV_LORA, scale=m.KV_LORA**-0.5),
            "gated": self.poisoned(rows),
        }

    def gates(self, rows: int, q: int) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths, gates that are NaN for rows without keys, and which rows these are."""
        m = self.module
        lengths = torch.randint(q, 4096, (rows // q,), dtype=torch.int32, device=DEVICE)
        lengths[1::3] = 0
        lengths[2::5] = q - 1  # its first row sees nothing, the later ones do
        gate = packed_column(rows, m.PITCH, m.GATE_COLUMN, m.HEADS * m.V_DIM, scale=4.0)
        gate[0, :4] = torch.tensor([-200.0, 200.0, -88.0, 0.0], device=DEVICE).bfloat16()
        hidden = self._visible(lengths, q) <= 0
        gate[hidden] = NAN
        return lengths, gate, hidden

    def poisoned(self, rows: int) -> Tensor:
        """An output of NaN."""
        m = self.module
        return torch.full((rows, m.HEADS * m.V_DIM), NAN, device=DEVICE).bfloat16()

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        latent, w_uv = given["latent"].double(), given["w_uv"].double()
        value = torch.einsum("rhl,hvl->rhv", latent, w_uv).flatten(1)
        mass = torch.einsum("rhl,hvl->rhv", latent.abs(), w_uv.abs()).flatten(1)
        # Two roundings to BF16, and FP32 sums whose error is far below 2^-20 of the mass.
        return self.judge(given, done, q, value, mass * 2.0**-12, 2 * BF16_UNIT * 1.01)

    def judge(self, given, done, q: int, value: Tensor, floor: Tensor, bound: float) -> Verdict:
        """gated against value * sigmoid(gate) of the rows that see keys; `floor` as of `value`."""
        sigmoid = torch.sigmoid(given["gate"].double())
        sees_keys = (self._visible(given["lengths"], q) > 0)[:, None]
        expected = torch.where(sees_keys, value * sigmoid, 0.0)
        floor = torch.where(sees_keys, floor * sigmoid + 1e-30, 0.0)
        verdict = Verdict()
        verdict.within("gated", done["gated"], expected, floor, bound)
        zero = torch.where(sees_keys, 0, done["gated"].view(torch.int16))
        verdict.equal("rows without keys", zero, torch.zeros_like(zero))
        return verdict

    def _visible(self, lengths: Tensor, q: int) -> Tensor:
        rows = torch.arange(lengths.shape[0] * q, device=DEVICE)
        return lengths[rows // q] - q + 1 + rows % q


class MlaGateCase(MlaValueCase):
    """gated = BF16(values * sigmoid(gate)), zero for rows without keys."""

    class_name = "MlaGate"
    variants = ({}, {"sigmoid": "exact"}, {"sigmoid": "fast"})
    spare_rows = 3  # of the buffer of values, behind those of the step

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        lengths, gate, hidden = self.gates(rows, q)
        buffer = torch.full((m.HEADS, rows + self.spare_rows, m.V_DIM), NAN, device=DEVICE)
        values = buffer.bfloat16()[:, :rows]
        values.copy_(noise(m.HEADS, rows, m.V_DIM))
        values[:, hidden] = NAN
        return {"values": values, "gate": gate, "lengths": lengths, "gated": self.poisoned(rows)}

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        value = given["values"].double().transpose(0, 1).flatten(1)
        floor = torch.zeros_like(value)
        return self.judge(given, done, q, value, floor, BF16_UNIT * 1.01)


CASES = {
    "rms_norm": RmsNormCase,
    "dsa_index": DsaIndexCase,
    "mla_value": MlaValueCase,
    "mla_gate": MlaGateCase,
}
