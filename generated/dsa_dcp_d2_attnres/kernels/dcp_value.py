"""Generated from pipelines/dsa_dcp_d2_attnres.yaml; do not edit.

Value of the latent attention where every rank holds a share of the context and some of the heads:

    merged = BF16(sum over s of share[s] * partial[s, row, head])   s in the order of the ranks
    share  = 2^(lse[s] - max) / their sum over s; 0 for a rank that has no key of the row
    v      = BF16(sum over l of merged[l] * w_uv[head, v, l])       FP32 accumulation
    gated  = BF16(v * sigmoid(gate)), exactly 0 for a row that sees no key on any rank

Before that it re-arms the query's mailbox and, with `pushes`, sends every head's row and LSE to
the head's owner: zeros and EMPTY_LSE for a row without keys here, whatever its memory holds.
Row i of request r sees max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests.

Grid     (HEADS, row CTAs, pushers): all re-arm and send, the first pusher of each merges. The CTAs
         that merge wait for what all CTAs of all ranks send, so not more are launched than run at
         the same time (`resident`); each takes every row CTAs-th tile of TILE_M rows.
Merge    a warp polls the LSE of a row, a source a lane; a thread polls a fragment of all sources.
Product  on the tensor cores out of shared memory; a warp makes 8 outputs, or several times that.
Wait     w_uv is loaded before it, the rest behind it. Never released: it polls.
Rounding to BF16: the merged row, v, and its product with the sigmoid.
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
PIECES = KV_LORA // VECTOR  # fragments of a head's row
HEAD_BYTES = KV_LORA * BF16_BYTES
SOURCE_BYTES = ROWS_CAP * HEADS * HEAD_BYTES  # from one rank's rows to the next
LSE_SOURCE_BYTES = ROWS_CAP * HEADS * FP32_BYTES
TILE_M = mma.TILE_M
SLICES = KV_LORA // mma.K_SLICE
WARPS = gcd(V_DIM // mma.TILE_N, 16)
TILES = V_DIM // mma.TILE_N // WARPS  # of 8 outputs, of a warp
THREADS = WARPS * reduce.WARP
SENDS = 4  # fragments of a thread before another CTA helps to send
MERGED_PITCH = row_pitch(KV_LORA)
GATE_ALIGN = BF16_BYTES * memory.vector_width(BF16_BYTES, PITCH, GATE_COLUMN)
LSE_SCALES = {"2": 1.0, "e": log2(e)}
HALVES = ("whole", "publish", "collect")


def operands(pushes: bool = False, half: str = "whole") -> tuple[TensorSpec | None, ...]:
    """Tensors of a launch, in the order of the arguments; None where a flag leaves one out."""
    rows = Symbol("rows")
    sends, merges = pushes and half != "collect", half != "publish"
    sources = (SOURCE_BYTES // BF16_BYTES, HEADS * KV_LORA, KV_LORA, 1)
    lse_sources = (LSE_SOURCE_BYTES // FP32_BYTES, HEADS, 1)
    return (
        TensorSpec("partial", "bf16", (rows, GATHERED, KV_LORA)) if sends else None,
        TensorSpec("partial_lse", "fp32", (rows, GATHERED), align=4) if sends else None,
        TensorSpec("valid", "i32", (rows,), align=4) if sends else None,
        TensorSpec("gate", "bf16", (rows, HEADS * V_DIM), (PITCH, 1), align=GATE_ALIGN),
        TensorSpec("lengths", "i32", (None,), align=4),
        TensorSpec("w_uv", "bf16", (HEADS, V_DIM, KV_LORA)),
        TensorSpec("q_mail", "u8", (rows, GATHERED, LATENT)),
        TensorSpec("partial_mail", "bf16", (RANKS, rows, HEADS, KV_LORA), sources),
        TensorSpec("partial_mail_peers", "i64", (RANKS,)) if sends else None,
        TensorSpec("lse_mail", "fp32", (RANKS, rows, HEADS), lse_sources, align=4),
        TensorSpec("lse_mail_peers", "i64", (RANKS,)) if sends else None,
        TensorSpec("gated", "bf16", (rows, HEADS * V_DIM)),
        TensorSpec("fault", "i64", (1,), align=8) if merges else None,
    )


@dataclass(frozen=True)
class DcpValue:
    """gated = the ranks' rows merged, through W_UV, gated.

    pdl:      launch with the attribute that lets this grid start before its predecessor ends.
    pushes:   send this rank's rows; otherwise the core has done so.
    lse_base: base of the LSE that comes with the rows: 2 or e.
    sigmoid:  refined, exact or fast; see the device function.
    half:     whole; or apart what it re-arms and sends (publish) and what it waits for (collect).
    resident: CTAs that run at the same time for sure.
    """

    pdl: bool = True
    pushes: bool = False
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
        """CTAs that have to run at once: one a head; with more it takes more rows at a time."""
        return HEADS

    @cute.jit
    def __call__(
        self,
        partial: cute.Tensor | None,
        partial_lse: cute.Tensor | None,
        valid: cute.Tensor | None,
        gate: cute.Tensor,
        lengths: cute.Tensor,
        w_uv: cute.Tensor,
        q_mail: cute.Tensor,
        partial_mail: cute.Tensor,
        partial_mail_peers: cute.Tensor | None,
        lse_mail: cute.Tensor,
        lse_mail_peers: cute.Tensor | None,
        gated: cute.Tensor,
        fault: cute.Tensor | None,
        stream,
    ):
        rows = gated.shape[0]
        row_ctas = cutlass.min(cute.ceil_div(rows, TILE_M), max(self.resident // HEADS, 1))
        pushers = cutlass.Int32(1)
        if cutlass.const_expr(self.half != "collect"):
            helpers = cute.ceil_div(rows * GATHERED * PIECES, HEADS * row_ctas * THREADS * SENDS)
            pushers = cutlass.min(cutlass.max(self.resident // (HEADS * row_ctas), 1), helpers)
        self.dcp_value(
            partial=partial,
            partial_lse=partial_lse,
            valid=valid,
            gate=gate,
            lengths=lengths,
            w_uv=w_uv,
            q_mail=q_mail,
            partial_mail=partial_mail,
            partial_mail_peers=partial_mail_peers,
            lse_mail=lse_mail,
            lse_mail_peers=lse_mail_peers,
            gated=gated,
            fault=fault,
        ).launch(
            grid=[HEADS, row_ctas, pushers],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
            min_blocks_per_mp=1,  # registers for the weights; one CTA is what it counts on
        )

    @cute.kernel
    def dcp_value(
        self,
        partial: cute.Tensor | None,
        partial_lse: cute.Tensor | None,
        valid: cute.Tensor | None,
        gate: cute.Tensor,
        lengths: cute.Tensor,
        w_uv: cute.Tensor,
        q_mail: cute.Tensor,
        partial_mail: cute.Tensor,
        partial_mail_peers: cute.Tensor | None,
        lse_mail: cute.Tensor,
        lse_mail_peers: cute.Tensor | None,
        gated: cute.Tensor,
        fault: cute.Tensor | None,
    ):
        head, row_cta, pusher = cute.arch.block_idx()
        _, row_ctas, pushers = cute.arch.grid_dim()
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        first_output = cute.arch.warp_idx() * (TILES * mma.TILE_N)
        weights = []
        if cutlass.const_expr(self.half != "publish"):
            outputs = [first_output + tile * mma.TILE_N + group for tile in range(TILES)]
            weights = [self._weights(w_uv[head, output, None], group_lane) for output in outputs]
        pdl.wait()
        if cutlass.const_expr(self.half != "collect"):
            cta = (pusher * row_ctas + row_cta) * HEADS + head
            first = cta * THREADS + cute.arch.thread_idx()[0]
            step = HEADS * row_ctas * pushers * THREADS
            self._rearm_query(q_mail, first, step)
            if cutlass.const_expr(self.pushes):
                self._push(partial, valid, partial_mail_peers, first, step)
                self._push_lse(partial_lse, valid, lse_mail_peers, first, step)
        if cutlass.const_expr(self.half != "publish"):
            shared = SmemAllocator()
            merged = shared.allocate_tensor(
                BFloat16, cute.make_layout((TILE_M, KV_LORA), stride=(MERGED_PITCH, 1)), 16
            )
            shares = memory.allocate(shared, Float32, TILE_M, RANKS)
            if pusher == 0:
                rows = gated.shape[0]
                tiles = cute.ceil_div(rows, TILE_M)
                for tile in cutlass.range(row_cta, tiles, row_ctas, unroll=1):
                    first_row = tile * TILE_M
                    self._share(lse_mail, head, first_row, shares, fault)
                    cute.arch.sync_threads()
                    self._merge(partial_mail, head, first_row, shares, merged, fault)
                    cute.arch.sync_threads()
                    self._value(merged, weights, gate, lengths, gated, head, first_row)
                    cute.arch.sync_threads()  # before the next tile's rows take their place

    def _weights(self, row: cute.Tensor, group_lane) -> list:
        """This lane's words of one row of w_uv."""
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
    def _push(self, partial: cute.Tensor, valid: cute.Tensor, peers: cute.Tensor, first, step):
        """Every head's row to the head's owner, without negative zeros."""
        items = partial.shape[0] * (GATHERED * PIECES)
        for base in cutlass.range(first, items, step * SENDS, unroll=1):
            loaded = []  # all of them, before the first is stored
            for number in cutlass.range_constexpr(SENDS):
                item = cutlass.min(base + number * step, items - 1)
                row, gathered = item // (GATHERED * PIECES), item // PIECES % GATHERED
                words = memory.load_words(partial[row, gathered, None], item % PIECES)
                loaded.append((row, gathered, item % PIECES, words, valid[row] > 0))
            for number in cutlass.range_constexpr(SENDS):
                if base + number * step < items:
                    self._send(*loaded[number], peers)

    def _send(self, row, gathered, piece, words, filled, peers: cute.Tensor) -> None:
        """One fragment of a head's row to the head's owner; zeros for a row without keys here."""
        sent = [
            scalar.choose(filled, mailbox.clear_negative_zero(words[n]), Uint32(0))
            for n in range(mailbox.WORDS)
        ]
        offset = Int64(row * HEADS + gathered % HEADS) * HEAD_BYTES
        offset = offset + piece * mailbox.FRAGMENT_BYTES
        mailbox.store(peers[gathered // HEADS] + offset, sent)

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
    def _share(self, lse_mail: cute.Tensor, head, first_row, shares: cute.Tensor, fault):
        """shares[row, source] of a tile: a warp takes a row, a lane a source."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for turn in cutlass.range_constexpr(0, TILE_M, WARPS):
            row = first_row + turn + warp
            lse = Float32(mailbox.EMPTY_LSE)
            if row < lse_mail.shape[1] and lane < RANKS:
                place = Int64(row * HEADS + head) * FP32_BYTES + lane * LSE_SOURCE_BYTES
                address = lse_mail.iterator.toint() + place
                word = mailbox.load_word(address)
                word = mailbox.settle(word, address, mailbox.ALL_ONES, "dcp_value", fault)
                mailbox.rearm(address, mailbox.ALL_ONES, 1)
                lse = word[0].bitcast(Float32)
            counts = lse > Float32(mailbox.EMPTY_LSE)
            power = lse * Float32(LSE_SCALES[self.lse_base])
            highest = reduce.lanes_max(scalar.select(counts, power, Float32(mailbox.EMPTY_LSE)))
            weight = scalar.select(counts, cute.arch.exp2(power - highest), Float32(0.0))
            total = Float32(0.0)
            for source in cutlass.range_constexpr(RANKS):
                total = total + cute.arch.shuffle_sync(weight, source)
            if lane < RANKS:
                share = scalar.select(total > Float32(0.0), weight / total, Float32(0.0))
                shares[turn + warp, lane] = share

    @cute.jit
    def _merge(
        self, partial_mail: cute.Tensor, head, first_row, shares: cute.Tensor,
        merged: cute.Tensor, fault,
    ):  # fmt: skip
        """The tile's rows of this head, summed in the order of the ranks; re-arms what is read."""
        present = cutlass.min(partial_mail.shape[1] - first_row, TILE_M)
        start = partial_mail.iterator.toint()
        for item in cutlass.range(cute.arch.thread_idx()[0], present * PIECES, THREADS, unroll=1):
            row, piece = item // PIECES, item % PIECES
            place = start + Int64((first_row + row) * HEADS + head) * HEAD_BYTES
            place = place + piece * mailbox.FRAGMENT_BYTES
            addresses = [place + Int64(source * SOURCE_BYTES) for source in range(RANKS)]
            polled = [mailbox.load(address) for address in addresses]
            sums = [Float32(0.0) for _ in range(VECTOR)]
            for source in cutlass.range_constexpr(RANKS):
                address, share = addresses[source], shares[row, source]
                sentinel = mailbox.NEGATIVE_ZERO
                words = mailbox.settle(polled[source], address, sentinel, "dcp_value", fault)
                mailbox.rearm(address, sentinel)
                for number in cutlass.range_constexpr(mailbox.WORDS):
                    # A rank without weight counts for nothing, whatever it has sent.
                    word = scalar.choose(share > Float32(0.0), words[number], Uint32(0))
                    low, high = scalar.unpack_bf16(word)
                    sums[2 * number] = sums[2 * number] + share * low
                    sums[2 * number + 1] = sums[2 * number + 1] + share * high
            pairs = [half.pack_bf16(sums[n], sums[n + 1]) for n in range(0, VECTOR, 2)]
            target = cute.recast_tensor(memory.vector_at(merged[row, None], piece, VECTOR), Uint32)
            memory.store_words(target, pairs)

    @cute.jit
    def _value(
        self, merged: cute.Tensor, weights: list, gate: cute.Tensor, lengths: cute.Tensor,
        gated: cute.Tensor, head, first_row,
    ):  # fmt: skip
        """The products of a tile, gated; every lane stores pairs of neighbouring outputs."""
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        rows = gated.shape[0]
        queries = rows // lengths.shape[0]
        sums = [[mma.zero_accumulator(), mma.zero_accumulator()] for _ in range(TILES)]
        for step in cutlass.range_constexpr(SLICES):
            place = step * mma.GROUP_LANES + group_lane
            upper = memory.load_words(merged[group, None], place)
            lower = memory.load_words(merged[group + mma.HALF_M, None], place)
            for tile in cutlass.range_constexpr(TILES):
                chain = sums[tile][step % 2]
                sums[tile][step % 2] = mma.mma_slice(upper, lower, weights[tile][step], chain)
        for tile in cutlass.range_constexpr(TILES):
            chains = sums[tile]
            total = [chains[0][n] + chains[1][n] for n in range(mma.FRAGMENT)]
            output = (cute.arch.warp_idx() * TILES + tile) * mma.TILE_N
            pair = (head * V_DIM + output) // 2 + group_lane
            for side in cutlass.range_constexpr(2):
                row = first_row + group + side * mma.HALF_M
                if row < rows:
                    sees_keys = lengths[row // queries] > queries - 1 - row % queries
                    factors = memory.load_float(gate[row, None], pair, 2)
                    values = mma.pair(total, side).to(BFloat16).to(Float32)
                    outputs = self._gate(values, factors, sees_keys)
                    memory.vector_at(gated[row, None], pair, 2).store(outputs)

    def _gate(self, values: cute.TensorSSA, factors: cute.TensorSSA, sees_keys) -> cute.TensorSSA:
        """BF16(values * sigmoid(factors)), or zeros for a row that sees no key."""
        result = cute.make_rmem_tensor((2,), Float32)
        for place in range(2):
            product = values[place] * sigmoid(factors[place], self.sigmoid)
            result[place] = scalar.select(sees_keys, product, Float32(0.0))
        return result.load().to(BFloat16)
