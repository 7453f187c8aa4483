"""Random inputs and oracle of the scorer, written from the maths; see small.py."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.small import DEVICE, NAN, Verdict
from kpipe.runtime.sharding import Shard

EDGES = (131072, 0, 1, 63, 64, 65, 2047, 2048, 2049, 32768, 5000)
"""Lengths of the requests: long, empty, around a page, around many pages."""

TIMED_LENGTH = 32768
POISON = (0x7F, 0xFF)  # the two NaNs of E4M3; four of the latter are an FP32 NaN
OTHER_LAYERS = 2  # pages of other layers between two of this one

# 8 steps of the tensor core, each of which may drop what lies 2^-23 below its largest term, and
# some ten roundings of the sum over the heads, relative to the sum of all magnitudes.
# With E4M3 products Hopper aligns 32 of them to the largest and keeps some 14 bits.
BOUNDS = {"f16": 8 * 2.0**-23 + 10 * 2.0**-24, "e4m3": 2.0**-14}


class IndexScoresCase:
    """scores[row, j] = scale_j * sum_h w_h * relu(q_h . k_j) of the visible keys."""

    class_name, outputs = "IndexScores", ("scores",)
    variants = ({}, {"groups": 2}, {"stages": 6, "ctas": 7}, {"product": "e4m3"})
    queries = (1, 2, 4)

    def __init__(self, module: ModuleType):
        self.module = module
        self.flags: dict[str, object] = {"product": "f16"}  # of the launch that `check` judges

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        """Every edge once, from one that depends on the number of requests, then short ones."""
        requests = rows // q
        edges = [EDGES[(requests + place) % len(EDGES)] for place in range(len(EDGES))]
        lengths = [*edges, *(97 * place % 700 for place in range(requests))]
        return self.of_lengths(torch.tensor(lengths[:requests]), q)

    def timed(self, rows: int, q: int) -> dict[str, Tensor]:
        """Every request TIMED_LENGTH long."""
        return self.of_lengths(torch.full((rows // q,), TIMED_LENGTH), q)

    @property
    def shard(self) -> Shard:
        """The share of every context that the launch scores."""
        names = ("rank", "ranks", "interleave")
        return Shard(**{name: int(self.flags[name]) for name in names if name in self.flags})

    def of_lengths(self, lengths: Tensor, q: int, spare: int = 5) -> dict[str, Tensor]:
        """Operands for requests of the given lengths; `spare` blocks of the cache stay unused."""
        m = self.module
        lengths = lengths.to(DEVICE, torch.int32)
        requests = lengths.numel()
        held = self.shard.local_length(lengths.long())
        pages = -(-held // m.PAGE)
        width = int(pages.max()) + 3
        blocks = int(pages.sum()) + spare
        order = torch.randperm(blocks, device=DEVICE).int()
        table = order[torch.randint(0, blocks, (requests, width + 2), device=DEVICE)][:, :width]
        place = torch.arange(width, device=DEVICE)
        used = place < pages[:, None]
        table[used] = order[: int(pages.sum())]
        weights = torch.randn(requests * q, m.INDEX_HEADS, device=DEVICE)
        return {
            "index_q8": random_codes(requests * q, m.INDEX_HEADS, m.INDEX_DIM),
            "index_w": weights,
            "index_kv": self._cache(blocks, table, held),
            "index_table": table,
            "lengths": lengths,
            "scores": torch.full((requests * q, width * m.PAGE + 8), NAN, device=DEVICE),
        }

    def _cache(self, blocks: int, table: Tensor, lengths: Tensor) -> Tensor:
        """Pages among other layers' pages; NaN in every byte that no request sees."""
        m = self.module
        memory = torch.randint(
            0, 2, (blocks, 1 + OTHER_LAYERS, m.PAGE_BYTES), dtype=torch.uint8, device=DEVICE
        )
        memory.mul_(POISON[1] - POISON[0]).add_(POISON[0])
        cache = memory[:, 1]
        keys = cache[:, : m.KEY_BYTES].unflatten(1, (m.PAGE, m.INDEX_DIM))
        scales = cache[:, m.KEY_BYTES :].unflatten(1, (m.PAGE, m.FP32_BYTES))
        for request, length in enumerate(lengths.tolist()):
            tokens = torch.arange(length, device=DEVICE)
            block, token = table[request].long()[tokens // m.PAGE], tokens % m.PAGE
            keys[block, token] = random_codes(length, m.INDEX_DIM)
            scale = torch.exp(torch.randn(length, 1, device=DEVICE))
            scales[block, token] = scale.view(torch.uint8)
        return cache.unflatten(1, (m.PAGE, m.TOKEN_BYTES))

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int) -> Verdict:
        m, verdict, bound = self.module, Verdict(), BOUNDS[self.flags["product"]]
        bits = done["scores"].view(torch.int32)
        before = given["scores"].view(torch.int32)
        flat = given["index_kv"].flatten(1)
        for request, length in enumerate(given["lengths"].tolist()):
            tokens = torch.arange(self.shard.local_length(length), device=DEVICE)
            block = given["index_table"][request].long()[tokens // m.PAGE]
            token = (tokens % m.PAGE)[:, None]
            at = token * m.INDEX_DIM + torch.arange(m.INDEX_DIM, device=DEVICE)
            keys = decoded(flat[block[:, None], at])
            at = m.KEY_BYTES + token * m.FP32_BYTES + torch.arange(m.FP32_BYTES, device=DEVICE)
            scale = flat[block[:, None], at].view(torch.float32).double().flatten()
            for turn in range(q):
                row = request * q + turn
                seen = self.shard.local_length(max(length - q + 1 + turn, 0))
                query = decoded(given["index_q8"][row])
                weight = given["index_w"][row].double()
                dots = torch.relu(keys[:seen] @ query.t())
                mass = keys[:seen].abs() @ query.abs().t()
                expected = (dots @ weight) * scale[:seen]
                floor = (mass @ weight.abs()) * scale[:seen]
                if seen:
                    verdict.within("scores", done["scores"][row, :seen], expected, floor, bound)
                verdict.equal("columns behind", bits[row, seen:], before[row, seen:])
        return verdict


def random_codes(*shape: int) -> Tensor:
    """E4M3 codes of normal numbers as a quantiser leaves them: large, small, zero and +-448."""
    values = torch.randn(*shape, device=DEVICE) * 120
    values *= torch.where(torch.rand(*shape, device=DEVICE) < 0.1, 2.0**-13, 1.0)
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def decoded(codes: Tensor) -> Tensor:
    """The values of E4M3 codes in float64."""
    return codes.view(torch.float8_e4m3fn).double()


CASES = {"index_scores": IndexScoresCase}
