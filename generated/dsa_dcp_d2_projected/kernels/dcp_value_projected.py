"""Generated from pipelines/dsa_dcp_d2_projected.yaml; do not edit.

Value of the latent attention where every rank holds a share of the context and some of the heads;
rows travel behind W_UV:

    sent  = BF16(sum over l of partial[row, head, l] * w_uv_all[head, v, l])   FP32 accumulation
    share = 2^(lse[s] - max) / their sum over s; 0 for a rank that has no key of the row
    v     = BF16(sum over s of share[s] * sent[s, row, head])       s in the order of the ranks
    gated = BF16(v * sigmoid(gate)), exactly 0 for a row that sees no key on any rank

It re-arms the query's mailbox, sends every head's LSE and row to the head's owner (EMPTY_LSE and
zeros for a row without keys here, whatever its memory holds), and merges the rows of its own heads.
Row i of request r sees max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests.

Grid     (GATHERED, row CTAs): a CTA makes one head's values of every row CTAs-th tile of TILE_M
         rows, then merges with all others. As CTAs wait for what all CTAs of all ranks send, not
         more are launched than run at the same time (`resident`).
Product  on the tensor cores out of shared memory; a warp makes 8 outputs, or several times that.
Merge    a warp takes a row of a head: a lane polls the LSE of a source, and a fragment of all
         sources' rows, requested together.
Wait     w_uv_all is loaded before it, the rest behind it. Never released: it polls.
Rounding to BF16: what is sent, the merged value, and its product with the sigmoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import e, gcd, log2

import cutlass
from cutlass import BFloat16, Float32, Int64, Uint32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import half, mailbox, memory, mma, pdl, reduce, scalar
from kpipe.runtime.device.sigmoid import MODES, sigmoid
from kpipe.runtime.device.split_product import row_pitch
from kpipe.runtime.host.compile import Symbol, TensorSpec

RANKS = 2
HEADS = 48  # of this rank
KV_LORA = 512
LATENT = 576  # elements of a query row
V_DIM = 128
PITCH = 8416  # elements from one packed row to the next
GATE_COLUMN = 2112  # where the gate begins in a packed row
ROWS_CAP = 64  # rows of a mailbox

BF16_BYTES, FP32_BYTES = 2, 4
GATHERED = RANKS * HEADS
QUERY_BYTES = 1
QUERY_FRAGMENTS = GATHERED * LATENT * QUERY_BYTES // mailbox.FRAGMENT_BYTES  # of a row
VECTOR = memory.BF16_VECTOR
PIECES = V_DIM // VECTOR  # fragments of a head's row on its way
HEAD_BYTES = V_DIM * BF16_BYTES
SOURCE_BYTES = ROWS_CAP * HEADS * HEAD_BYTES  # from one rank's rows to the next
LSE_SOURCE_BYTES = ROWS_CAP * HEADS * FP32_BYTES
TILE_M = mma.TILE_M
SLICES = KV_LORA // mma.K_SLICE
WARPS = gcd(V_DIM // mma.TILE_N, 16)
TILES = V_DIM // mma.TILE_N // WARPS  # of 8 outputs, of a warp
THREADS = WARPS * reduce.WARP
LATENT_PIECES = KV_LORA // VECTOR  # fragments of a head's row ahead of W_UV
TILE_PIECES = TILE_M * LATENT_PIECES
BANKS = 32
ROW_PITCH = row_pitch(KV_LORA)
SENT_PITCH = V_DIM // 2 + (mma.GROUP_LANES - V_DIM // 2) % BANKS  # words; fragments hit all banks
GATE_VECTOR = memory.vector_width(BF16_BYTES, V_DIM, PITCH, GATE_COLUMN)
LSE_SCALES = {"2": 1.0, "e": log2(e)}
HALVES = ("whole", "publish", "collect")
STAGE = "dcp_value_projected"


def operands(half: str = "whole") -> tuple[TensorSpec | None, ...]:
    """Tensors of a launch, in the order of the arguments; None where a flag leaves one out."""
    rows = Symbol("rows")
    sends, merges = half != "collect", half != "publish"
    sources = (SOURCE_BYTES // BF16_BYTES, HEADS * V_DIM, V_DIM, 1)
    lse_sources = (LSE_SOURCE_BYTES // FP32_BYTES, HEADS, 1)
    gate = ((rows, HEADS * V_DIM), (PITCH, 1))
    return (
        TensorSpec("partial", "bf16", (rows, GATHERED, KV_LORA)) if sends else None,
        TensorSpec("partial_lse", "fp32", (rows, GATHERED), align=4) if sends else None,
        TensorSpec("valid", "i32", (rows,), align=4) if sends else None,
        TensorSpec("gate", "bf16", *gate, align=BF16_BYTES * GATE_VECTOR) if merges else None,
        TensorSpec("lengths", "i32", (None,), align=4) if merges else None,
        TensorSpec("w_uv_all", "bf16", (GATHERED, V_DIM, KV_LORA)) if sends else None,
        TensorSpec("q_mail", "u8", (rows, GATHERED, LATENT)),
        TensorSpec("partial_mail", "bf16", (RANKS, rows, HEADS, V_DIM), sources),
        TensorSpec("partial_mail_peers", "i64", (RANKS,)) if sends else None,
        TensorSpec("lse_mail", "fp32", (RANKS, rows, HEADS), lse_sources, align=4),
        TensorSpec("lse_mail_peers", "i64", (RANKS,)) if sends else None,
        TensorSpec("gated", "bf16", (rows, HEADS * V_DIM)) if merges else None,
        TensorSpec("fault", "i64", (1,), align=8) if merges else None,
    )


@dataclass(frozen=True)
class DcpValueProjected:
    """gated = the ranks' rows through W_UV, merged, gated.

    pdl:      launch with the attribute that lets this grid start before its predecessor ends.
    lse_base: base of the LSE that comes with the rows: 2 or e.
    sigmoid:  refined, exact or fast; see the device function.
    half:     whole; or apart what it re-arms and sends (publish) and what it waits for (collect).
    resident: CTAs that run at the same time for sure.
    """

    pdl: bool = True
    lse_base: str = "2"
    sigmoid: str = "refined"
    half: str = "whole"
    resident: int = 132

    def __post_init__(self) -> None:
        if self.sigmoid not in MODES:
            raise ValueError(f"unknown sigmoid {self.sigmoid!r}; choose from {', '.join(MODES)}")
        if self.half not in HALVES:
            raise ValueError(f"half is {self.half!r}; choose from {', '.join(HALVES)}")
        if self.lse_base not in LSE_SCALES:
            raise ValueError(f"lse_base is {self.lse_base!r}; choose 2 or e")
        if RANKS > reduce.WARP:
            raise ValueError(f"{RANKS} ranks, a warp merges the LSE of {reduce.WARP} at most")

    def resident_ctas(self, rows: int) -> int:
        """CTAs that have to run at once: one a gathered head; with more it takes more rows."""
        return GATHERED

    @cute.jit
    def __call__(
        self,
        partial: cute.Tensor | None,
        partial_lse: cute.Tensor | None,
        valid: cute.Tensor | None,
        gate: cute.Tensor | None,
        lengths: cute.Tensor | None,
        w_uv_all: cute.Tensor | None,
        q_mail: cute.Tensor,
        partial_mail: cute.Tensor,
        partial_mail_peers: cute.Tensor | None,
        lse_mail: cute.Tensor,
        lse_mail_peers: cute.Tensor | None,
        gated: cute.Tensor | None,
        fault: cute.Tensor | None,
        stream,
    ):
        tiles = cute.ceil_div(q_mail.shape[0], TILE_M)
        row_ctas = cutlass.min(tiles, max(self.resident // GATHERED, 1))
        self.dcp_value_projected(
            partial=partial,
            partial_lse=partial_lse,
            valid=valid,
            gate=gate,
            lengths=lengths,
            w_uv_all=w_uv_all,
            q_mail=q_mail,
            partial_mail=partial_mail,
            partial_mail_peers=partial_mail_peers,
            lse_mail=lse_mail,
            lse_mail_peers=lse_mail_peers,
            gated=gated,
            fault=fault,
        ).launch(
            grid=[GATHERED, row_ctas, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=1,  # registers for the weights; one CTA is what it counts on
        )

    @cute.kernel
    def dcp_value_projected(
        self,
        partial: cute.Tensor | None,
        partial_lse: cute.Tensor | None,
        valid: cute.Tensor | None,
        gate: cute.Tensor | None,
        lengths: cute.Tensor | None,
        w_uv_all: cute.Tensor | None,
        q_mail: cute.Tensor,
        partial_mail: cute.Tensor,
        partial_mail_peers: cute.Tensor | None,
        lse_mail: cute.Tensor,
        lse_mail_peers: cute.Tensor | None,
        gated: cute.Tensor | None,
        fault: cute.Tensor | None,
    ):
        gathered, row_cta, _ = cute.arch.block_idx()
        _, row_ctas, _ = cute.arch.grid_dim()
        cta, ctas = row_cta * GATHERED + gathered, GATHERED * row_ctas
        weights = []
        if cutlass.const_expr(self.half != "collect"):
            group, group_lane = mma.fragment_place(cute.arch.lane_idx())
            first_output = cute.arch.warp_idx() * (TILES * mma.TILE_N) + group
            outputs = [first_output + tile * mma.TILE_N for tile in range(TILES)]
            matrix = w_uv_all[gathered, None, None]
            weights = [self._weights(matrix[output, None], group_lane) for output in outputs]
        pdl.wait()
        if cutlass.const_expr(self.half != "collect"):
            shared = SmemAllocator()
            tile_rows = shared.allocate_tensor(
                BFloat16, cute.make_layout((TILE_M, KV_LORA), stride=(ROW_PITCH, 1)), 16
            )
            sent = shared.allocate_tensor(
                Uint32, cute.make_layout((TILE_M, V_DIM // 2), stride=(SENT_PITCH, 1)), 16
            )
            first, step = cta * THREADS + cute.arch.thread_idx()[0], ctas * THREADS
            self._rearm_query(q_mail, first, step)
            self._push_lse(partial_lse, valid, lse_mail_peers, first, step)
            tiles = cute.ceil_div(partial.shape[0], TILE_M)
            for tile in cutlass.range(row_cta, tiles, row_ctas, unroll=1):
                first_row = tile * TILE_M
                self._load(partial, gathered, first_row, tile_rows)
                cute.arch.sync_threads()  # and all rows of the tile before are on their way
                self._project(tile_rows, weights, sent)
                cute.arch.sync_threads()
                self._push(sent, valid, partial_mail_peers, gathered, first_row)
        if cutlass.const_expr(self.half != "publish"):
            warp = cute.arch.warp_idx() * ctas + cta  # few rows are spread over all CTAs
            for item in cutlass.range(warp, gated.shape[0] * HEADS, ctas * WARPS, unroll=1):
                self._merge(item, partial_mail, lse_mail, gate, lengths, gated, fault)

    def _weights(self, row: cute.Tensor, group_lane) -> list:
        """This lane's words of one row of w_uv_all."""
        return [
            memory.load_words_once(row, step * mma.GROUP_LANES + group_lane)
            for step in range(SLICES)
        ]

    @cute.jit
    def _rearm_query(self, q_mail: cute.Tensor, first, step):
        """The rows of the query that the core has read."""
        start = q_mail.iterator.toint()
        for item in cutlass.range(first, q_mail.shape[0] * QUERY_FRAGMENTS, step, unroll=4):
            place = start + Int64(item) * mailbox.FRAGMENT_BYTES
            mailbox.rearm(place, mailbox.ALL_ONES)

    @cute.jit
    def _push_lse(self, lse: cute.Tensor, valid: cute.Tensor, peers: cute.Tensor, first, step):
        """Every head's LSE to the head's owner."""
        for item in cutlass.range(first, lse.shape[0] * GATHERED, step, unroll=1):
            row, gathered = item // GATHERED, item % GATHERED
            value = mailbox.sendable_lse(lse[row, gathered])
            sent = scalar.select(valid[row] > 0, value, Float32(mailbox.EMPTY_LSE))
            offset = Int64(row * HEADS + gathered % HEADS) * FP32_BYTES
            mailbox.store(peers[gathered // HEADS] + offset, [sent.bitcast(Uint32)])

    @cute.jit
    def _load(self, partial: cute.Tensor, gathered, first_row, tile_rows: cute.Tensor):
        """This rank's rows of a head; those behind the last are that one again."""
        last, loaded = partial.shape[0] - 1, []  # all of them, before the first is stored
        for first in cutlass.range_constexpr(0, TILE_PIECES, THREADS):
            item = cutlass.min(cute.arch.thread_idx()[0] + first, TILE_PIECES - 1)
            row, piece = item // LATENT_PIECES, item % LATENT_PIECES
            source = partial[cutlass.min(first_row + row, last), gathered, None]
            loaded.append((row, piece, memory.load_words(source, piece)))
        for number in cutlass.range_constexpr(len(loaded)):
            row, piece, words = loaded[number]
            if cute.arch.thread_idx()[0] + number * THREADS < TILE_PIECES:
                target = memory.vector_at(tile_rows[row, None], piece, VECTOR)
                target = cute.recast_tensor(target, Uint32)
                memory.store_words(target, [words[n] for n in range(mailbox.WORDS)])

    def _project(self, tile_rows: cute.Tensor, weights: list, sent: cute.Tensor) -> None:
        """The products of a tile, rounded; every lane stores pairs of neighbouring outputs."""
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        sums = [[mma.zero_accumulator(), mma.zero_accumulator()] for _ in range(TILES)]
        for step in range(SLICES):
            place = step * mma.GROUP_LANES + group_lane
            upper = memory.load_words(tile_rows[group, None], place)
            lower = memory.load_words(tile_rows[group + mma.HALF_M, None], place)
            for tile in range(TILES):
                chain = sums[tile][step % 2]
                sums[tile][step % 2] = mma.mma_slice(upper, lower, weights[tile][step], chain)
        for tile in range(TILES):
            chains = sums[tile]
            total = [chains[0][n] + chains[1][n] for n in range(mma.FRAGMENT)]
            output = (cute.arch.warp_idx() * TILES + tile) * mma.TILE_N
            for side in range(2):
                word = half.pack_bf16(total[2 * side], total[2 * side + 1])
                sent[group + side * mma.HALF_M, output // 2 + group_lane] = word

    @cute.jit
    def _push(self, sent: cute.Tensor, valid: cute.Tensor, peers: cute.Tensor, gathered, first_row):
        """A tile's values to the head's owner, without negative zeros; zeros for a row without
        keys here."""
        present = cutlass.min(valid.shape[0] - first_row, TILE_M)
        for item in cutlass.range(cute.arch.thread_idx()[0], present * PIECES, THREADS, unroll=1):
            row, piece = first_row + item // PIECES, item % PIECES
            words = memory.load_words(sent[item // PIECES, None], piece)
            filled = valid[row] > 0
            values = [
                scalar.choose(filled, mailbox.clear_negative_zero(words[n]), Uint32(0))
                for n in range(mailbox.WORDS)
            ]
            offset = Int64(row * HEADS + gathered % HEADS) * HEAD_BYTES
            offset = offset + piece * mailbox.FRAGMENT_BYTES
            mailbox.store(peers[gathered // HEADS] + offset, values)

    @cute.jit
    def _merge(
        self, item, partial_mail: cute.Tensor, lse_mail: cute.Tensor, gate: cute.Tensor,
        lengths: cute.Tensor, gated: cute.Tensor, fault: cute.Tensor,
    ):  # fmt: skip
        """A row of a head, by a warp: summed in the order of the ranks, gated; re-arms it.

        Lanes without a fragment request one as well and leave what comes of it alone: only the
        lane that re-arms a word may wait for it.
        """
        row, head, lane = item // HEADS, item % HEADS, cute.arch.lane_idx()
        for turn in cutlass.range_constexpr(0, PIECES, reduce.WARP):
            piece = cutlass.min(turn + lane, PIECES - 1)
            place = partial_mail.iterator.toint() + Int64(item) * HEAD_BYTES
            place = place + piece * mailbox.FRAGMENT_BYTES
            addresses = [place + Int64(source * SOURCE_BYTES) for source in range(RANKS)]
            polled = [mailbox.load(address) for address in addresses]
            factors = self._factors(gate[row, None], head * PIECES + piece)
            if cutlass.const_expr(turn == 0):
                shares = self._shares(item, lse_mail, fault)
            if turn + lane < PIECES:
                sums = [Float32(0.0) for _ in range(VECTOR)]
                for source in cutlass.range_constexpr(RANKS):
                    address, share = addresses[source], shares[source]
                    words = mailbox.settle(
                        polled[source], address, mailbox.NEGATIVE_ZERO, STAGE, fault
                    )
                    mailbox.rearm(address, mailbox.NEGATIVE_ZERO)
                    for number in cutlass.range_constexpr(mailbox.WORDS):
                        # A rank without weight counts for nothing, whatever it has sent.
                        word = scalar.choose(share > Float32(0.0), words[number], Uint32(0))
                        low, high = scalar.unpack_bf16(word)
                        sums[2 * number] = sums[2 * number] + share * low
                        sums[2 * number + 1] = sums[2 * number + 1] + share * high
                queries = gated.shape[0] // lengths.shape[0]
                sees_keys = lengths[row // queries] > queries - 1 - row % queries
                target = memory.vector_at(gated[row, None], head * PIECES + piece, VECTOR)
                target.store(self._gate(sums, factors, sees_keys))

    @cute.jit
    def _shares(self, item, lse_mail: cute.Tensor, fault: cute.Tensor) -> list:
        """What each rank's row of an item weighs, the same in every lane; a lane polls a rank."""
        lane = cute.arch.lane_idx()
        lse = Float32(mailbox.EMPTY_LSE)
        if lane < RANKS:
            place = Int64(item) * FP32_BYTES + lane * LSE_SOURCE_BYTES
            address = lse_mail.iterator.toint() + place
            word = mailbox.load_word(address)
            word = mailbox.settle(word, address, mailbox.ALL_ONES, STAGE, fault)
            mailbox.rearm(address, mailbox.ALL_ONES, 1)
            lse = word[0].bitcast(Float32)
        counts = lse > Float32(mailbox.EMPTY_LSE)
        power = lse * Float32(LSE_SCALES[self.lse_base])
        highest = reduce.lanes_max(scalar.select(counts, power, Float32(mailbox.EMPTY_LSE)))
        weight = scalar.select(counts, cute.arch.exp2(power - highest), Float32(0.0))
        weights = [cute.arch.shuffle_sync(weight, source) for source in range(RANKS)]
        total = Float32(0.0)
        for source in cutlass.range_constexpr(RANKS):
            total = total + weights[source]
        return [
            scalar.select(total > Float32(0.0), weights[source] / total, Float32(0.0))
            for source in range(RANKS)
        ]

    def _factors(self, row: cute.Tensor, fragment) -> list[Float32]:
        """A fragment's columns of the gate."""
        loads = VECTOR // GATE_VECTOR
        parts = [
            memory.load_float(row, fragment * loads + part, GATE_VECTOR) for part in range(loads)
        ]
        return [part[place] for part in parts for place in range(GATE_VECTOR)]

    def _gate(self, sums: list[Float32], factors: list[Float32], sees_keys) -> cute.TensorSSA:
        """BF16(BF16(sums) * sigmoid(factors)), or zeros for a row that sees no key."""
        result = cute.make_rmem_tensor((VECTOR,), Float32)
        for pair in range(VECTOR // 2):
            first, second = 2 * pair, 2 * pair + 1
            values = scalar.unpack_bf16(half.pack_bf16(sums[first], sums[second]))
            for place, value in zip((first, second), values, strict=True):
                product = value * sigmoid(factors[place], self.sigmoid)
                result[place] = scalar.select(sees_keys, product, Float32(0.0))
        return result.load().to(BFloat16)
