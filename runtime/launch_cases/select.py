"""Random inputs and the oracle of topk_select, written from its definition, on bits."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.small import DEVICE, NAN, Verdict

LENGTHS = (0, 1, 63, 64, 65, 2047, 2048, 2049, 2050, 4096, 8191, 16384, 16385, 32768, 131072)


def keys_of(scores: Tensor) -> Tensor:
    """int64 that orders like the score's bits: +0 above -0, NaN as -inf."""
    clean = torch.where(scores.isnan(), -torch.inf, scores)
    bits = clean.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def random_scores(seen: list[int], context: int, *, plain: bool = False) -> Tensor:
    """FP32 [rows, context], NaN behind the keys that a row sees; with ties, infinities, NaN and
    every magnitude, unless they are to be `plain`."""
    scores = torch.full((len(seen), context), NAN, device=DEVICE)
    for row, count in enumerate(seen):
        values = torch.randn(count, device=DEVICE) * 3
        kind = 0 if plain else row % 7
        if kind == 1:
            values = (values * 4).round() / 4  # many ties, both zeros
        elif kind == 2:
            values = torch.full_like(values, 0.5)  # nothing but ties
        elif kind == 3 and count:
            values[:: max(count // 7, 1)] = -torch.inf
            values[3 :: max(count // 5, 1)] = NAN
            values[: count // 2] *= 1e-30
        elif kind == 4:
            values *= 1e6  # beyond FP16
        elif kind == 5:
            values = values.sort().values  # all of the best side by side
        elif kind == 6:
            values = values.round() * 1e-9  # ties among what FP16 takes for zeros
        scores[row, :count] = values
    return scores


class TopkSelectCase:
    """selected, valid = exact top-k of each row, physical rows in ascending order of position."""

    class_name, outputs = "TopkSelect", ("selected", "valid")
    variants = ({}, {"tie": "high_id"}, {"parts": 4}, {"parts": 2})
    judged_flags = ("tie",)
    queries = (1, 4)

    def __init__(self, module: ModuleType):
        self.module = module

    def timed(self, rows: int, q: int) -> dict[str, Tensor]:
        """Every key of the context is visible."""
        return self.inputs(rows, q, self.module.CONTEXT)

    def inputs(self, rows: int, q: int, length: int | None = None) -> dict[str, Tensor]:
        m = self.module
        requests = rows // q
        if length is None:
            offset = int(torch.randint(len(LENGTHS), ()))
            lengths = [LENGTHS[(offset + r) % len(LENGTHS)] for r in range(requests)]
        else:
            lengths = [length] * requests
        seen = [max(lengths[row // q] - q + 1 + row % q, 0) for row in range(rows)]
        scores = random_scores(seen, m.CONTEXT, plain=length is not None)
        pages = -(-max(*lengths, 1) // m.PAGE)
        blocks = requests * pages + 3
        table = torch.randperm(blocks, device=DEVICE)[: requests * pages]
        stride = 3 * m.PAGE * m.ROW_BYTES
        cache = torch.empty(stride * 2, dtype=torch.uint8, device=DEVICE)
        return {
            "scores": scores,
            "lengths": torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            "block_table": table.view(requests, pages).int(),
            "latent_kv": cache.as_strided((2, m.PAGE, m.ROW_BYTES), (stride, m.ROW_BYTES, 1)),
            "selected": torch.full((rows, m.TOP_K), 0x7F7F7F7F, dtype=torch.int32, device=DEVICE),
            "valid": torch.full((rows,), 0x7F7F7F7F, dtype=torch.int32, device=DEVICE),
        }

    def check(self, given: dict[str, Tensor], done: dict[str, Tensor], q: int, tie: str) -> Verdict:
        m = self.module
        verdict = Verdict()
        block_rows = given["latent_kv"].stride(0) // m.ROW_BYTES
        for row in range(given["scores"].shape[0]):
            seen = max(int(given["lengths"][row // q]) - q + 1 + row % q, 0)
            keys = keys_of(given["scores"][row, :seen])
            positions = torch.arange(seen, device=DEVICE)
            rank = keys * 2**32 + (positions if tie == "high_id" else 2**32 - 1 - positions)
            best = rank.argsort(descending=True)[: m.TOP_K].sort().values
            table = given["block_table"][row // q].long()
            expected = torch.full((m.TOP_K,), -1, dtype=torch.int32, device=DEVICE)
            physical = table[best // m.PAGE] * block_rows + best % m.PAGE
            expected[: best.numel()] = physical.int()
            verdict.equal(f"row {row} of {seen} keys", done["selected"][row], expected)
            if int(done["valid"][row]) != best.numel():
                verdict.wrong.append(
                    f"row {row}: valid {int(done['valid'][row])}, not {best.numel()}"
                )
        return verdict


CASES = {"topk_select": TopkSelectCase}
