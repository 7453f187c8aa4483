"""Random inputs and oracles of the exchange of candidates, on bits; see small.py and boxes.py."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kpipe.runtime.launch_cases.boxes import Boxes, armed, check_armed, check_place
from kpipe.runtime.launch_cases.exchange import ALL_ONES, ROWS_MORE, some_rank
from kpipe.runtime.launch_cases.select import LENGTHS, keys_of, random_scores
from kpipe.runtime.launch_cases.small import DEVICE, Verdict
from kpipe.runtime.sharding import Shard

EMPTY_ID = -(2**31)
MINUS_INFINITY = torch.tensor(-torch.inf).view(torch.int32).item()
ID_SPAN = 2**28
POISON = 0x7F7F7F7F


def best(scores: Tensor, ids: Tensor, top_k: int, tie: str) -> Tensor:
    """Places of the top_k best of candidates (FP32 scores, int64 ids), in ascending order."""
    rank = keys_of(scores) * ID_SPAN + (ids if tie == "high_id" else ID_SPAN - 1 - ids)
    return rank.argsort(descending=True)[:top_k].sort().values


def sent_bits(scores: Tensor) -> Tensor:
    """The scores' bits as they travel: NaN as -inf."""
    return torch.where(scores.isnan(), -torch.inf, scores).view(torch.int32)


class _ShardCase:
    """What both kernels are told of the contexts' shards."""

    queries = (1, 4)
    judged_flags = ("tie", "rank")

    def __init__(self, module: ModuleType):
        self.module = module
        self.boxes = Boxes()
        self.flags: dict[str, object] = {}
        self.place = 0

    def shard(self, rank: int | None = None) -> Shard:
        """The share of one rank, by default of the launch's own."""
        own = int(self.flags.get("rank", 0))
        return Shard(
            own if rank is None else rank,
            self.module.RANKS,
            int(self.flags.get("interleave", 1)),
        )


class TopkLocalCase(_ShardCase):
    """The best keys of one rank, in every rank's mailbox."""

    class_name, outputs = "TopkLocal", ()
    variants = ({}, {"tie": "high_id"}, {"parts": 4}, {"parts": 2}, {"rank": 1})

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        offset = int(torch.randint(len(LENGTHS), ()))
        held = [LENGTHS[(offset + r) % len(LENGTHS)] for r in range(rows // q)]
        lengths = torch.tensor([min(n, m.CONTEXT) * m.RANKS for n in held])
        lengths = (lengths - torch.randint(m.RANKS, lengths.shape)).clamp(min=0)
        self.place = some_rank(m.RANKS)
        shape = (m.RANKS, rows + ROWS_MORE, m.TOP_K, 2)
        own = self.place * shape[1] * m.TOP_K * 8
        seen = self._seen(lengths, q)
        return {
            "scores": random_scores(seen, m.CONTEXT),
            "lengths": lengths.int().to(DEVICE),
            "candidates_peers": self.boxes.table(m.RANKS, shape, torch.int32, ALL_ONES, own),
        }

    def _seen(self, lengths: Tensor, q: int) -> list[int]:
        """Keys that each row sees here."""
        visible = [
            max(length - q + 1 + turn, 0) for length in lengths.tolist() for turn in range(q)
        ]
        return [self.shard().local_length(count) for count in visible]

    def check(
        self, given: dict[str, Tensor], done: dict[str, Tensor], q: int, tie: str, rank: int
    ) -> Verdict:
        m, verdict = self.module, Verdict()
        rows = given["scores"].shape[0]
        expected = torch.empty(rows, m.TOP_K, 2, dtype=torch.int32, device=DEVICE)
        expected[..., 0], expected[..., 1] = MINUS_INFINITY, EMPTY_ID
        for row, count in enumerate(self._seen(given["lengths"], q)):
            scores = given["scores"][row, :count]
            ids = self.shard().global_position(torch.arange(count, device=DEVICE))
            kept = best(scores, ids, m.TOP_K, tie)
            expected[row, : kept.numel(), 0] = sent_bits(scores)[kept]
            expected[row, : kept.numel(), 1] = ids[kept].int()
        for peer, box in enumerate(self.boxes.of(done["candidates_peers"])):
            name = f"candidates at rank {peer}"
            place = (self.place, slice(0, rows))
            sent = check_place(verdict, name, box, place, ALL_ONES)
            verdict.equal(name, sent, expected)
        return verdict


class TopkMergeCase(_ShardCase):
    """This rank's share of the best of all ranks' candidates."""

    class_name = "TopkMerge"
    outputs = ("candidates", "selected", "valid")
    variants = ({}, {"tie": "high_id"}, {"rank": 1})

    def inputs(self, rows: int, q: int) -> dict[str, Tensor]:
        m = self.module
        mail = armed((m.RANKS, m.ROWS_CAP, m.TOP_K, 2), torch.int32, ALL_ONES)
        here = mail[:, :rows]
        here[..., 0], here[..., 1] = MINUS_INFINITY, EMPTY_ID
        reach = min(4 * m.TOP_K, m.CONTEXT)
        for row in range(rows):
            scores = random_scores([m.TOP_K] * m.RANKS, m.TOP_K, plain=row % 3 == 0)
            if row % 3 == 1:  # one kind of score at all ranks
                scores = scores[row % 7 % m.RANKS].expand_as(scores)
            for source, count in enumerate(self._counts(row)):
                local = torch.randperm(reach, device=DEVICE)[:count].sort().values
                here[source, row, :count, 0] = sent_bits(scores[source, :count])
                here[source, row, :count, 1] = self.shard(source).global_position(local).int()
        requests, pages = rows // q, -(-reach // m.PAGE)
        table = torch.randperm(requests * pages + 3, device=DEVICE)[: requests * pages]
        stride = 3 * m.PAGE * m.ROW_BYTES
        cache = torch.empty(stride * 2, dtype=torch.uint8, device=DEVICE)
        return {
            "candidates": here,
            "lengths": torch.zeros(requests, dtype=torch.int32, device=DEVICE),
            "block_table": table.view(requests, pages).int(),
            "latent_kv": cache.as_strided((2, m.PAGE, m.ROW_BYTES), (stride, m.ROW_BYTES, 1)),
            "selected": torch.full((rows, m.TOP_K), POISON, dtype=torch.int32, device=DEVICE),
            "valid": torch.full((rows,), POISON, dtype=torch.int32, device=DEVICE),
            "fault": self.boxes.fault(),
        }

    def _counts(self, row: int) -> list[int]:
        """Candidates of every rank: all they can send, none, just top_k together, or any."""
        m = self.module
        full = [m.TOP_K] * m.RANKS
        exact = [m.TOP_K // m.RANKS] * m.RANKS
        one_more = [exact[0] + 1, *exact[1:]]
        some = torch.randint(m.TOP_K + 1, (m.RANKS,)).tolist()
        return (full, some, [0] * m.RANKS, exact, one_more, [0, *full[1:]])[row % 6]

    def check(
        self, given: dict[str, Tensor], done: dict[str, Tensor], q: int, tie: str, rank: int
    ) -> Verdict:
        m, verdict = self.module, Verdict()
        check_armed(verdict, "candidates", done["candidates"], ALL_ONES)
        block_rows = given["latent_kv"].stride(0) // m.ROW_BYTES
        shard = self.shard()
        for row in range(given["selected"].shape[0]):
            pairs = given["candidates"][:, row].reshape(-1, 2)
            pairs = pairs[pairs[:, 1] != EMPTY_ID]
            scores, ids = pairs[:, 0].contiguous().view(torch.float32), pairs[:, 1].long()
            ids = ids[best(scores, ids, m.TOP_K, tie)]
            mine = shard.local(ids[shard.owner(ids) == shard.rank]).sort().values
            table = given["block_table"][row // q].long()
            expected = torch.full((m.TOP_K,), -1, dtype=torch.int32, device=DEVICE)
            physical = table[mine // m.PAGE] * block_rows + mine % m.PAGE
            expected[: mine.numel()] = physical.int()
            verdict.equal(f"row {row} of {ids.numel()} keys", done["selected"][row], expected)
            if int(done["valid"][row]) != mine.numel():
                verdict.wrong.append(
                    f"row {row}: valid {int(done['valid'][row])}, not {mine.numel()}"
                )
        return verdict


CASES = {"topk_local": TopkLocalCase, "topk_merge": TopkMergeCase}
