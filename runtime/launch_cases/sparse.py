"""Random inputs and oracle of the sparse attention core, written from the maths in float64."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.small import BF16_UNIT, DEVICE, NAN, Verdict, noise

NAN_BYTE = 0xFF  # a NaN as E4M3, and as any part of a BF16 or an FP32 of such bytes
EDGES = (1, 2048, 0, 65, 1000, 15, 16, 17, 63, 64, 2047, 129)
"""Keys of a row. The first launch, all that compute-sanitizer sees, begins at the second: a full
list, so that places in shared memory are used again, an empty one and two in between."""
LAYERS = 3  # a block of this cache lies among those of other layers
MIDDLE = 1
CACHE_BLOCKS = 512
TIMED_BLOCKS = 8192
CODE_SIZE = 30.0  # size of the E4M3 codes of queries and keys
SCALE_GROUP = 128
SCALE_BYTES = 4
SUM_ERROR = 2.0**-21  # of an FP32 sum of a row's products, relative to their magnitudes
F16_ERROR = 2.0**-11
F16_SMALLEST = 2.0**-24


def codes(*shape: int, size: float = CODE_SIZE) -> Tensor:
    """Bytes of random E4M3 numbers."""
    values = (torch.randn(*shape, device=DEVICE) * size).clamp(-448, 448)
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def values_of(bytes_: Tensor) -> Tensor:
    """E4M3 bytes as float64."""
    return bytes_.view(torch.float8_e4m3fn).double()


def spread_cache(blocks: int, page: int, row_bytes: int) -> Tensor:
    """A cache of NaN whose blocks lie between those of other layers, NaN as well."""
    shape = (blocks, LAYERS, page, row_bytes)
    whole = torch.full(shape, NAN_BYTE, dtype=torch.uint8, device=DEVICE)
    return whole[:, MIDDLE]


class SparseDecodeCase:
    """Softmax attention over the selected rows of an FP8 cache, in every form of the kernel."""

    class_name = "SparseDecode"
    variants = ({}, {"splits": 1}, {"splits": 2}, {"splits": 5}, {"splits": 16})
    queries = (1,)
    scales_are_powers = False

    def __init__(self, module: ModuleType):
        self.module = module
        self.names = [spec.name for spec in module.operands()]
        self.per_tensor = module.ROWS.query_dtype == "u8"
        self.outputs = tuple(self.names[6:])
        self.serial = 0

    def inputs(self, rows: int, q: int, far: bool = False) -> dict[str, Tensor]:
        """A cache of NaN but for the selected rows; with `far` they lie behind 2^32 bytes."""
        m = self.module
        self.serial += 1
        page_bytes = m.PAGE * m.ROWS.row_bytes
        first = 2**32 // (LAYERS * page_bytes) + 1 if far else 0
        cache = spread_cache(first + CACHE_BLOCKS, m.PAGE, m.ROWS.row_bytes)
        edges = [EDGES[(row + self.serial) % len(EDGES)] for row in range(rows)]
        valid = torch.tensor(edges, dtype=torch.int32, device=DEVICE).clamp(max=m.TOP_K)
        tokens = torch.stack(
            [torch.randperm(CACHE_BLOCKS * m.PAGE, device=DEVICE)[: m.TOP_K] for _ in range(rows)]
        )
        behind = torch.arange(m.TOP_K, device=DEVICE) >= valid[:, None]
        blocks, places = first + tokens // m.PAGE, tokens % m.PAGE
        cache[blocks[~behind], places[~behind]] = self.rows(int((~behind).sum()))
        physical = blocks * (cache.stride(0) // m.ROWS.row_bytes) + places
        out = torch.full((rows, m.HEADS, m.KV_LORA), NAN, device=DEVICE).bfloat16()
        lse = torch.full((rows, m.HEADS), NAN, device=DEVICE)
        tensors = (
            cache,
            torch.where(behind, -1, physical).to(torch.int32),
            valid,
            torch.rand(1, device=DEVICE) * 0.02 + 0.02,
            torch.rand(1, device=DEVICE) * 0.02 + 0.02,
            self.query(rows),
            out,
            lse,
        )
        return dict(zip(self.names, tensors, strict=False))

    def touched_bytes(self, rows: int) -> int:
        """Bytes that a launch with full lists touches, without the query and the output."""
        return rows * self.module.TOP_K * self.module.ROWS.row_bytes

    def timed_inputs(self, rows: int, count: int) -> list[dict[str, Tensor]]:
        """Sets of inputs with full lists of rows that lie anywhere in one large cache."""
        m = self.module
        cache = self.rows(TIMED_BLOCKS * m.PAGE).view(TIMED_BLOCKS, m.PAGE, m.ROWS.row_bytes)
        sets = []
        for _ in range(count):
            selected = torch.randint(0, TIMED_BLOCKS * m.PAGE, (rows, m.TOP_K), device=DEVICE)
            valid = torch.full((rows,), m.TOP_K, dtype=torch.int32, device=DEVICE)
            scales = (torch.full((1,), 0.03, device=DEVICE) for _ in range(2))
            out = torch.empty(rows, m.HEADS, m.KV_LORA, dtype=torch.bfloat16, device=DEVICE)
            lse = torch.empty(rows, m.HEADS, device=DEVICE)
            tensors = cache, selected.to(torch.int32), valid, *scales, self.query(rows), out, lse
            sets.append(dict(zip(self.names, tensors, strict=False)))
        return sets

    def query(self, rows: int) -> Tensor:
        """All but equal weights, a single heavy key, ties, and what is usual."""
        m = self.module
        shape = (rows, m.HEADS, m.KV_LORA + m.PE)
        if self.per_tensor:
            query = codes(*shape)
            query[:, 0] = codes(rows, shape[2], size=0.5)
            query[:, -1] = codes(rows, shape[2], size=300.0)
        else:
            query = noise(*shape)
            query[:, 0] *= 2.0**-7
            query[:, -1] *= 2.0**6
        query[::3, min(1, m.HEADS - 1)] = 0
        return query

    def rows(self, count: int) -> Tensor:
        """Bytes of random cache rows."""
        m = self.module
        if self.per_tensor:
            return codes(count, m.ROWS.row_bytes)
        exponents = torch.randn(count, m.KV_LORA // SCALE_GROUP, device=DEVICE) * 2 - 5
        scales = torch.exp2(exponents.round() if self.scales_are_powers else exponents)
        parts = codes(count, m.KV_LORA), scales.view(torch.uint8), noise(count, m.PE)
        return torch.cat([part.view(torch.uint8) for part in parts], dim=1)

    def keys_of(self, rows: Tensor, k_scale: Tensor) -> Tensor:
        """Values of cache rows in float64."""
        m = self.module
        if self.per_tensor:
            return values_of(rows) * k_scale.double()
        scales = self.scales_of(rows)
        latent = values_of(rows[:, : m.KV_LORA]) * scales.repeat_interleave(SCALE_GROUP, 1)
        position = rows[:, m.KV_LORA + scales.shape[1] * SCALE_BYTES :].contiguous()
        return torch.cat([latent, position.view(torch.bfloat16).double()], 1)

    def scales_of(self, rows: Tensor) -> Tensor:
        """The scales that cache rows carry, in float64 (row, group)."""
        first = self.module.KV_LORA
        end = first + first // SCALE_GROUP * SCALE_BYTES
        return rows[:, first:end].contiguous().view(torch.float32).double()

    def units_of(self, rows: Tensor) -> Tensor:
        """What the weights of cache rows are multiplied by before they are rounded to F16."""
        return torch.ones(len(rows), dtype=torch.float64, device=DEVICE)

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        m, verdict = self.module, Verdict()
        tensors = list(given.values())
        cache, selected, valid, q_scale, k_scale, query = tensors[:6]
        row_bytes = m.ROWS.row_bytes
        extent = (cache.shape[0] - 1) * cache.stride(0) // row_bytes + m.PAGE
        flat = cache.as_strided((extent, row_bytes), (row_bytes, 1))
        scale = q_scale.double() if self.per_tensor else 1.0
        for row, count in enumerate(valid.tolist()):
            out = done[self.outputs[0]][row]
            if count == 0:
                bits = out.view(torch.int16)
                verdict.equal("rows without keys", bits, torch.zeros_like(bits))
                expected_lse = torch.full((m.HEADS,), -torch.inf, device=DEVICE)
                if len(self.outputs) > 1:
                    verdict.equal("their LSE", done[self.outputs[1]][row], expected_lse)
                continue
            raw = flat[selected[row, :count].long()]
            keys = self.keys_of(raw, k_scale)
            heads = values_of(query[row]) if self.per_tensor else query[row].double()
            factor = scale * m.SOFTMAX_SCALE
            logits = heads @ keys.T * factor
            sizes = heads.abs() @ keys.abs().T * factor
            slack = (sizes * SUM_ERROR + logits.abs() * 2.0**-22).amax(1, keepdim=True)
            weights = torch.softmax(logits, 1)
            values = keys[:, : m.KV_LORA]
            mass = weights @ values.abs()
            units = self.units_of(raw)
            largest = (weights * units).amax(1, keepdim=True)
            lost = largest * (values.abs() / units[:, None]).sum(0) * F16_SMALLEST
            roundings = 1 if self.per_tensor else 2
            floor = (mass * (roundings * F16_ERROR + 2 * slack) + roundings * lost) / BF16_UNIT
            verdict.within(self.outputs[0], out, weights @ values, floor, BF16_UNIT * 1.01)
            if len(self.outputs) > 1:
                expected_lse = torch.logsumexp(logits, 1) / torch.log(torch.tensor(2.0))
                slack_lse = 2 * slack[:, 0] / torch.log(torch.tensor(2.0)) + 2.0**-20
                actual = done[self.outputs[1]][row].double()
                ratio = ((actual - expected_lse).abs() / slack_lse).nan_to_num(torch.inf).max()
                if ratio > 1:
                    verdict.wrong.append(f"lse: {float(ratio):.2f} of what its sums allow")
        return verdict


class SparseDecodeWideCase(SparseDecodeCase):
    """The same for tiles of 64 heads; the scales of a cache row are powers of two, as written."""

    class_name = "SparseDecodeWide"
    variants = (
        *({}, {"splits": 1}, {"splits": 2}, {"splits": 3}, {"splits": 7}, {"splits": 16}),
        *({"splits": 1, "parts": 2}, {"splits": 16, "parts": 2}, {"splits": 3, "parts": 4}),
    )
    scales_are_powers = True

    def units_of(self, rows: Tensor) -> Tensor:
        """Rows that carry scales enter over a power of two of their own, their weights times it."""
        if self.per_tensor:
            return super().units_of(rows)
        return self.scales_of(rows).amax(1)


CASES = {"sparse_decode": SparseDecodeCase, "sparse_decode_wide": SparseDecodeWideCase}
