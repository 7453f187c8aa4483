"""Random inputs and oracles of the query kernels; see small.py."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.small import (
    BF16_UNIT,
    DEVICE,
    E4M3_MAX,
    NAN,
    DsaIndexCase,
    Verdict,
    noise,
    packed_column,
    power_of_two_scale,
)

E4M3 = torch.float8_e4m3fn
GROUP = 128  # latents of one scale in fp8_ds_mla
SCALE_FLOOR = 1e-4
MASS_UNIT = 2.0**-10
"""Of the sum of magnitudes: FP32 noise, and values ahead that rounded to the other side."""
TIE_MARGIN = 2.0**-20
"""Relative distance from a rounding boundary that FP32 noise of a norm does not cross."""


def to_e4m3(value: Tensor) -> Tensor:
    """E4M3 codes, saturating."""
    return value.float().clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def rounded(value: Tensor) -> Tensor:
    """Rounded to BF16 and back to float64, in one step."""
    return value.to(torch.bfloat16).double()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The norm of every row, in float64."""
    x = x.double()
    return x * torch.rsqrt((x * x).mean(1, keepdim=True) + eps) * weight.double()


def avoid_ties(x: Tensor, weight: Tensor, eps: float) -> None:
    """Zeroes elements until no normed value lies where FP32 may round it to the other side."""
    for _ in range(200):
        y = rms_norm(x, weight, eps)
        near = rounded(y * (1 + TIE_MARGIN)) != rounded(y * (1 - TIE_MARGIN))
        if not near.any():
            return
        x[near] = 0
    raise RuntimeError("no rows without ties found")


def power_of_two(value: Tensor) -> Tensor:
    """Least power of two at or above a positive value, exactly."""
    mantissa, exponent = torch.frexp(value)
    return torch.ldexp(torch.ones_like(value), exponent - (mantissa == 0.5).to(exponent.dtype))


def between(verdict: Verdict, name: str, codes: Tensor, value: Tensor, slack: Tensor) -> None:
    """Every E4M3 code is the rounding of something within `slack` of `value`.

    The error recorded is the distance from `value` beyond half a step of E4M3, over `slack`.
    """
    actual = codes.view(E4M3).double()
    low, high = (to_e4m3(value + side * slack).double() for side in (-1, 1))
    outside = int(((actual < low) | (actual > high) | actual.isnan()).sum())
    if outside:
        verdict.wrong.append(f"{name}: {outside} of {actual.numel()} codes are no rounding")
    differ = (actual != to_e4m3(value).double()).double().mean().item()
    verdict.error, verdict.bound = max(verdict.error, differ), max(verdict.bound, 0.05)
    if differ > 0.05:
        verdict.wrong.append(f"{name}: {differ:.1%} of the codes differ from the oracle's")


@dataclass(frozen=True)
class NormedRows:
    """A q_a column whose norm has no ties, and the norm's weight."""

    column: Tensor
    weight: Tensor


def normed_rows(module: ModuleType, rows: int) -> NormedRows:
    """Rows of q_a at a random magnitude."""
    scale = 10.0 ** float(torch.empty(1).uniform_(-2, 2))
    column = packed_column(rows, module.PITCH, module.Q_A_COLUMN, module.Q_LORA, scale=scale)
    weight = noise(module.Q_LORA) + 1
    avoid_ties(column, weight, module.RMS_EPS)
    return NormedRows(column, weight)


class LatentQueryCase:
    """What the whole and the split query share: Q_B, W_UK, and the cache."""

    outputs: tuple[str, ...] = ("latent_kv", "query")
    queries = (1,)

    def __init__(self, module: ModuleType):
        self.module = module
        self.quantised = module.TOKEN_BYTES == module.LATENT  # fp8_tensor: the query is E4M3 too

    def shared_inputs(self, rows: int) -> dict[str, Tensor]:
        """Operands of both kernels but for the query's own rows, in the order of the contract."""
        m = self.module
        blocks = rows + 2
        between_bytes = torch.randint(0, 256, (blocks, 3, m.PAGE * m.TOKEN_BYTES), device=DEVICE)
        cache = between_bytes.to(torch.uint8)[:, 1].unflatten(1, (m.PAGE, m.TOKEN_BYTES))
        slots = torch.randperm(blocks * m.PAGE, device=DEVICE)[:rows]
        slots[1::3] = -1
        kv_a = packed_column(rows, m.PITCH, m.KV_A_COLUMN, m.LATENT)
        kv_a[:, : m.KV_LORA] *= 10.0 ** float(torch.empty(1).uniform_(-2, 2))
        kv_norm = noise(m.KV_LORA) + 1
        avoid_ties(kv_a[:, : m.KV_LORA], kv_norm, m.RMS_EPS)
        kv_a[slots < 0] = NAN  # a row that nobody keeps
        dtype = torch.uint8 if self.quantised else torch.bfloat16
        poison = 0x7F if self.quantised else NAN
        return {
            "kv_a": kv_a,
            "slots": slots,
            "kv_norm": kv_norm,
            "q_b": noise(m.HEADS * (m.NOPE + m.PE), m.Q_LORA, scale=m.Q_LORA**-0.5),
            "w_uk": noise(m.HEADS, m.NOPE, m.KV_LORA, scale=m.NOPE**-0.5),
            "q_scale_inv": torch.exp2(torch.empty(1, device=DEVICE).uniform_(0, 8.5)),
            "k_scale_inv": torch.exp2(torch.empty(1, device=DEVICE).uniform_(0, 8.5)),
            "latent_kv": cache,
            "query": torch.full((rows, m.HEADS, m.LATENT), poison, device=DEVICE).to(dtype),
        }

    def check_query(self, given, done, q_c: Tensor, verdict: Verdict) -> None:
        """The query of the BF16 rows `q_c`, at the declared rounding points."""
        m = self.module
        q_b = given["q_b"].double().unflatten(0, (m.HEADS, m.NOPE + m.PE))
        w_uk = given["w_uk"].double()
        full = torch.einsum("rk,hok->rho", q_c.double(), q_b)
        full_mass = torch.einsum("rk,hok->rho", q_c.double().abs(), q_b.abs())
        nope, pe = rounded(full[..., : m.NOPE]), rounded(full[..., m.NOPE :])
        absorbed = rounded(torch.einsum("rhn,hnl->rhl", nope, w_uk))
        mass = torch.einsum("rhn,hnl->rhl", nope.abs(), w_uk.abs())
        value = torch.cat([absorbed, pe], 2)
        mass = torch.cat([mass, full_mass[..., m.NOPE :]], 2)
        slack = value.abs() * (2 * BF16_UNIT) + mass * MASS_UNIT
        if self.quantised:
            scale = given["q_scale_inv"].double()
            between(verdict, "query", done["query"], value * scale, slack * scale)
        else:
            floor = mass * MASS_UNIT / BF16_UNIT
            verdict.within("query", done["query"], value, floor, 2 * BF16_UNIT * 1.002)

    def check_cache(self, given, done, verdict: Verdict) -> None:
        """Cache rows of the slots >= 0, and no other byte."""
        m = self.module
        latent = rounded(rms_norm(given["kv_a"][:, : m.KV_LORA], given["kv_norm"], m.RMS_EPS))
        pe = given["kv_a"][:, m.KV_LORA :]
        before, after = given["latent_kv"].clone(), done["latent_kv"]
        kept = (given["slots"] >= 0).nonzero().flatten()
        page, token = given["slots"][kept] // m.PAGE, given["slots"][kept] % m.PAGE
        rows = after[page, token]
        check = self._check_tensor_rows if self.quantised else self._check_group_rows
        check(rows, latent[kept], pe[kept], given["k_scale_inv"], verdict)
        before[page, token] = rows
        verdict.equal("bytes of other tokens", after, before)

    def _check_tensor_rows(self, rows, latent, pe, k_scale_inv, verdict: Verdict) -> None:
        m = self.module
        scaled = latent * k_scale_inv.double()
        codes = rows[:, : m.KV_LORA].contiguous()
        between(verdict, "latent", codes, scaled, scaled.abs() * TIE_MARGIN)
        expected = to_e4m3(pe.float() * k_scale_inv).view(torch.uint8)
        verdict.equal("pe", rows[:, m.KV_LORA :], expected)

    def _check_group_rows(self, rows, latent, pe, k_scale_inv, verdict: Verdict) -> None:
        m = self.module
        groups = latent.unflatten(1, (-1, GROUP))
        end = m.KV_LORA + groups.shape[1] * 4
        scale = rows[:, m.KV_LORA : end].contiguous().view(torch.float32).double()
        quotient = groups.abs().amax(2) / E4M3_MAX
        verdict.equal("group scales", scale, power_of_two(quotient.clamp_min(SCALE_FLOOR)))
        expected = to_e4m3((groups / scale[..., None]).flatten(1)).view(torch.uint8)
        verdict.equal("latent", rows[:, : m.KV_LORA], expected)
        verdict.equal("pe", rows[:, end:].contiguous().view(torch.int16), pe.view(torch.int16))


class MlaQueryCase(LatentQueryCase):
    """query = absorbed | pe of RMSNorm(q_a), cache rows of kv_a."""

    class_name = "MlaQuery"
    outputs = ("latent_kv", "query", "q_c")
    variants = ({}, {"tokens": 16}, {"tokens": 64}, {"writes_q_c": True})

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        q_a = normed_rows(m, rows)
        shared = self.shared_inputs(rows)
        return {
            "q_a": q_a.column,
            **{name: shared.pop(name) for name in ("kv_a", "slots")},
            "q_norm": q_a.weight,
            **shared,
            "q_c": torch.full((rows, m.Q_LORA), NAN, dtype=torch.bfloat16, device=DEVICE),
        }

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        normed = rounded(rms_norm(given["q_a"], given["q_norm"], self.module.RMS_EPS))
        verdict = Verdict()
        self.check_query(given, done, normed, verdict)
        self.check_cache(given, done, verdict)
        if done["q_c"] is not None:
            verdict.equal("q_c", done["q_c"].double(), normed)
        return verdict


class MlaQuerySplitCase(LatentQueryCase):
    """As MlaQueryCase, from normed rows."""

    class_name = "MlaQuerySplit"
    variants = ({}, {"tokens": 32})

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        return {"q_c": noise(rows, self.module.Q_LORA), **self.shared_inputs(rows)}

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        verdict = Verdict()
        self.check_query(given, done, given["q_c"], verdict)
        self.check_cache(given, done, verdict)
        return verdict


class IndexFrontCase(DsaIndexCase):
    """dsa_index on the FP32 product of RMSNorm(q_a), or q_c, with index_q_b."""

    class_name = "IndexFront"
    variants = ({}, {"normalized": True}, {"tile_n": 16}, {"tokens": 8, "held": 16})
    product_noise = 2.0**-18  # of the sum of magnitudes: FP32 sums in another order

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        q_a = normed_rows(m, rows)
        operands = super().inputs(rows, q)
        del operands["index_q"]
        matrix = noise(m.INDEX_HEADS, m.INDEX_DIM, m.Q_LORA, scale=m.Q_LORA**-0.5)
        matrix *= torch.exp(4 * torch.randn(m.INDEX_HEADS, 1, 1, device=DEVICE)).bfloat16()
        matrix[0] = 0  # the floor of the scale
        operands["wv"][operands["wv"] == 0] = 1  # so that the scale can be read off index_w
        return {
            "q_a": q_a.column,
            "q_c": rms_norm(q_a.column, q_a.weight, m.RMS_EPS).bfloat16(),
            "q_norm": q_a.weight,
            "index_q_b": matrix.flatten(0, 1),
            **operands,
        }

    def _check_query(self, given, done, verdict: Verdict) -> None:
        m = self.module
        q_c = given["q_c"].double()
        matrix = given["index_q_b"].double().unflatten(0, (m.INDEX_HEADS, m.INDEX_DIM))
        query = torch.einsum("rk,hdk->rhd", q_c, matrix)
        slack = torch.einsum("rk,hdk->rhd", q_c.abs(), matrix.abs()) * self.product_noise
        constant = m.INDEX_DIM**-0.5 * m.INDEX_HEADS**-0.5
        factor = given["wv"].double() * constant
        scale = torch.exp2(torch.round(torch.log2(done["index_w"].double() / factor)))
        amax, doubt = query.abs().amax(2), slack.amax(2)
        low, high = (power_of_two_scale(amax + side * doubt) for side in (-1, 1))
        wrong = int(((scale != low) & (scale != high)).sum())
        if wrong:
            verdict.wrong.append(f"query scales: {wrong} of {scale.numel()} wrong")
        weights = scale * factor
        verdict.within("index_w", done["index_w"], weights, torch.zeros_like(weights), 1e-6)
        codes = query / scale[..., None]
        between(verdict, "index_q8", done["index_q8"], codes, slack / scale[..., None])


CASES = {
    "mla_query": MlaQueryCase,
    "mla_query_split": MlaQuerySplitCase,
    "index_front": IndexFrontCase,
}
