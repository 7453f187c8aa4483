"""Random inputs and oracle of the sparse attention core, written from the maths in float64."""

from __future__ import annotations

from types import ModuleType

import torch
from kernel_cases import BF16_UNIT, DEVICE, NAN, Verdict
from torch import Tensor

E4M3_NAN = 0x7F
EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 2047, 2048, 129, 1000)
LAYERS = 3  # a block of this cache lies among those of other layers
MIDDLE = 1
CACHE_BLOCKS = 1024
CODE_SIZE = 30.0  # size of the E4M3 codes of queries and keys
SUM_ERROR = 2.0**-21  # of an FP32 sum of a row's products, relative to their magnitudes
F16_ERROR = 2.0**-11


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
    whole = torch.full(shape, E4M3_NAN, dtype=torch.uint8, device=DEVICE)
    return whole[:, MIDDLE]


def physical_rows(cache: Tensor, tokens: Tensor) -> Tensor:
    """Physical row of a token's slot: blocks lie a whole number of rows apart."""
    page, row_bytes = cache.shape[1:]
    return tokens // page * (cache.stride(0) // row_bytes) + tokens % page


class SparseDecodeCase:
    """latent = BF16(softmax(query . keys) . values) over the selected rows of an FP8 cache."""

    class_name, outputs = "SparseDecode", ("latent",)
    variants = ({}, {"splits": 1}, {"splits": 2}, {"splits": 5}, {"splits": 16})
    queries = (1,)

    def __init__(self, module: ModuleType):
        self.module = module
        self.serial = 0

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        self.serial += 1
        cache = spread_cache(CACHE_BLOCKS, m.PAGE, m.ROWS.row_bytes)
        edges = [EDGES[(row + self.serial) % len(EDGES)] for row in range(rows)]
        valid = torch.tensor(edges, dtype=torch.int32, device=DEVICE).clamp(max=m.TOP_K)
        tokens = torch.stack(
            [torch.randperm(CACHE_BLOCKS * m.PAGE, device=DEVICE)[: m.TOP_K] for _ in range(rows)]
        )
        behind = torch.arange(m.TOP_K, device=DEVICE) >= valid[:, None]
        blocks, places = tokens // m.PAGE, tokens % m.PAGE
        cache[blocks[~behind], places[~behind]] = codes(int((~behind).sum()), m.ROWS.row_bytes)
        selected = physical_rows(cache, tokens).to(torch.int32)
        query = codes(rows, m.HEADS, (m.KV_LORA + m.PE))
        query[:, 0] = codes(rows, (m.KV_LORA + m.PE), size=0.5)  # all but equal weights
        query[:, -1] = codes(rows, (m.KV_LORA + m.PE), size=300.0)  # one key takes it all
        query[::3, min(1, m.HEADS - 1)] = 0  # ties
        return {
            "latent_kv": cache,
            "selected": torch.where(behind, -1, selected),
            "valid": valid,
            "q_scale": torch.rand(1, device=DEVICE) * 0.02 + 0.02,
            "k_scale": torch.rand(1, device=DEVICE) * 0.02 + 0.02,
            "query": query,
            "latent": torch.full((rows, m.HEADS, m.KV_LORA), NAN, device=DEVICE).bfloat16(),
        }

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        m = self.module
        verdict = Verdict()
        cache = given["latent_kv"]
        flat = cache.as_strided(
            (cache.shape[0] * cache.stride(0) // m.ROWS.row_bytes - MIDDLE * m.PAGE, m.ROWS.row_bytes),
            (m.ROWS.row_bytes, 1),
        )
        scale = given["q_scale"].double() * given["k_scale"].double() * m.SOFTMAX_SCALE
        for row, count in enumerate(given["valid"].tolist()):
            out = done["latent"][row]
            if count == 0:
                verdict.equal("rows without keys", out.view(torch.int16), torch.zeros_like(out).view(torch.int16))
                continue
            keys = values_of(flat[given["selected"][row, :count].long()])
            query = values_of(given["query"][row])
            logits = query @ keys.T * scale
            sizes = query.abs() @ keys.abs().T * scale
            slack = (sizes * SUM_ERROR + logits.abs() * 2.0**-22).amax(1, keepdim=True)
            weights = torch.softmax(logits, 1)
            k_scale = given["k_scale"].double()
            expected = weights @ keys[:, : m.KV_LORA] * k_scale
            mass = weights @ keys[:, : m.KV_LORA].abs() * k_scale
            floor = mass * (F16_ERROR + 2 * slack) / BF16_UNIT
            verdict.within("latent", out, expected, floor, BF16_UNIT * 1.01)
        return verdict


CASES = {"sparse_decode": SparseDecodeCase}
