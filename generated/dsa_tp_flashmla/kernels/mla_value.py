"""Generated from pipelines/dsa_tp_flashmla.yaml; do not edit.

Value of the latent attention: every head's latent through W_UV, then the output gate.

    v     = BF16(sum over l of latent[row, head, l] * w_uv[head, v, l])      FP32 accumulation
    gated = BF16(v * sigmoid(gate)), exactly 0 for a row that sees no key

Row i of request r sees max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests; the zero is
selected, so a padded row may hold anything.

Grid     (V_DIM / v_tile, HEADS, ceil(rows / TILE_M)); WARPS warps share a tile of TILE_M rows by
         v_tile outputs and split the latent between them, KV_LORA / WARPS columns a warp.
Loads    16 bytes a lane, straight into the fragments of the tensor cores; no shared memory but
         for the sum over the warps, added in their order.
Wait     w_uv is loaded before it; latent, gate and lengths behind it. Released once their loads
         are issued; `early` ahead of the wait, so that the next kernel may load its weights while
         the core still runs, where it finds room.
Rounding to BF16 twice: v, and its product with the sigmoid.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import cutlass
from cutlass import BFloat16, Float32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import memory, mma, pdl, reduce, scalar
from kpipe.runtime.device.sigmoid import MODES, sigmoid
from kpipe.runtime.host.compile import Symbol, TensorSpec

HEADS = 12
KV_LORA = 512
V_DIM = 128
PITCH = 3808  # elements from one packed row to the next
GATE_COLUMN = 2112  # where the gate begins in a packed row

BF16_BYTES = 2
TILE_M = mma.TILE_M  # rows of a CTA
SLICES = KV_LORA // mma.K_SLICE
MAX_WARPS = 4
WARPS = gcd(SLICES, MAX_WARPS)
WARP_SLICES = SLICES // WARPS
THREADS = WARPS * reduce.WARP
BANK_PAD = 8  # FP32 words behind a row of partial sums: fragments then hit distinct banks
GATE_ALIGN = BF16_BYTES * memory.vector_width(BF16_BYTES, PITCH, GATE_COLUMN)


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    return (
        TensorSpec("latent", "bf16", (rows, HEADS, KV_LORA)),
        TensorSpec("gate", "bf16", (rows, HEADS * V_DIM), (PITCH, 1), align=GATE_ALIGN),
        TensorSpec("lengths", "i32", (None,), align=4),
        TensorSpec("w_uv", "bf16", (HEADS, V_DIM, KV_LORA)),
        TensorSpec("gated", "bf16", (rows, HEADS * V_DIM)),
    )


@dataclass(frozen=True)
class MlaValue:
    """gated = BF16(BF16(W_UV . latent) * sigmoid(gate)), zero for rows without keys.

    release: let the dependent grid start once this one's loads are issued.
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    sigmoid: refined, exact or fast; see the device function.
    v_tile:  outputs of a CTA, a multiple of 8 that divides V_DIM.
    early:   1 releases ahead of the wait, 0 behind the loads.
    """

    release: bool = True
    pdl: bool = True
    sigmoid: str = "refined"
    v_tile: int = 16
    early: int = 0

    def __post_init__(self) -> None:
        if self.sigmoid not in MODES:
            raise ValueError(f"unknown sigmoid {self.sigmoid!r}; choose from {', '.join(MODES)}")
        if self.v_tile % mma.TILE_N or V_DIM % self.v_tile:
            raise ValueError(f"v_tile {self.v_tile} is not a multiple of 8 that divides {V_DIM}")

    @cute.jit
    def __call__(
        self,
        latent: cute.Tensor,
        gate: cute.Tensor,
        lengths: cute.Tensor,
        w_uv: cute.Tensor,
        gated: cute.Tensor,
        stream,
    ):
        self.mla_value(latent=latent, gate=gate, lengths=lengths, w_uv=w_uv, gated=gated).launch(
            grid=[V_DIM // self.v_tile, HEADS, cute.ceil_div(latent.shape[0], TILE_M)],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def mla_value(
        self,
        latent: cute.Tensor,
        gate: cute.Tensor,
        lengths: cute.Tensor,
        w_uv: cute.Tensor,
        gated: cute.Tensor,
    ):
        tile, head, row_tile = cute.arch.block_idx()
        warp = cute.arch.warp_idx()
        group, group_lane = mma.fragment_place(cute.arch.lane_idx())
        shared = SmemAllocator()
        partial = shared.allocate_tensor(Float32, self._partial_layout(), memory.VECTOR_BYTES)
        rows = latent.shape[0]
        first_row = row_tile * TILE_M
        first_output = tile * self.v_tile

        weights = [
            self._load_slices(
                w_uv[head, first_output + column + group, None],
                warp,
                group_lane,
                memory.load_words_once,
            )
            for column in range(0, self.v_tile, mma.TILE_N)
        ]
        # This thread's share of the result: `width` neighbouring outputs of one row. Rows past the
        # end read the last one; what comes of it is not stored.
        width = TILE_M * self.v_tile // THREADS
        share = cute.arch.thread_idx()[0]
        share_row = share // (self.v_tile // width)
        share_part = share % (self.v_tile // width)
        column = (head * V_DIM + first_output) // width + share_part
        row = first_row + share_row
        read_row = cutlass.min(row, rows - 1)
        upper_row = cutlass.min(first_row + group, rows - 1)
        lower_row = cutlass.min(first_row + group + mma.HALF_M, rows - 1)
        queries = rows // lengths.shape[0]
        request = read_row // queries
        later_queries = queries - 1 - read_row % queries

        if cutlass.const_expr(self.release and self.early):
            pdl.release()
        pdl.wait()
        upper = self._load_slices(latent[upper_row, head, None], warp, group_lane)
        lower = self._load_slices(latent[lower_row, head, None], warp, group_lane)
        gate_values = memory.vector_at(gate[read_row, None], column, width).load()
        length = lengths[request]
        if cutlass.const_expr(self.release and not self.early):
            pdl.release()

        self._store_products(upper, lower, weights, partial[warp, None, None], group, group_lane)
        cute.arch.sync_threads()
        sums = self._sum_over_warps(partial[None, share_row, None], share_part, width)
        outputs = self._gate(sums, gate_values.to(Float32), length > later_queries)
        if row < rows:
            memory.vector_at(gated[row, None], column, width).store(outputs)

    def _partial_layout(self) -> cute.Layout:
        """(warp, row, output) sums of a CTA, rows padded."""
        pitch = self.v_tile + BANK_PAD
        return cute.make_layout((WARPS, TILE_M, self.v_tile), stride=(TILE_M * pitch, pitch, 1))

    def _load_slices(self, row: cute.Tensor, warp, group_lane, load=memory.load_words) -> list:
        """This lane's words of the KV_LORA / WARPS columns of `row` that its warp sums over."""
        first = warp * WARP_SLICES
        return [
            load(row, (first + step) * mma.GROUP_LANES + group_lane) for step in range(WARP_SLICES)
        ]

    def _store_products(self, upper, lower, weights, partial: cute.Tensor, group, group_lane):
        """Multiplies the warp's fragments and stores its sums into `partial`."""
        sums = [mma.zero_accumulator() for _ in weights]
        for step in range(WARP_SLICES):
            for tile, columns in enumerate(weights):
                sums[tile] = mma.mma_slice(upper[step], lower[step], columns[step], sums[tile])
        for tile, accumulator in enumerate(sums):
            target = cute.local_tile(partial, (mma.TILE_M, mma.TILE_N), (0, tile))
            mma.store_fragment(accumulator, target, group, group_lane)

    def _sum_over_warps(self, partial: cute.Tensor, part, width: int) -> cute.TensorSSA:
        """The `part`-th `width` outputs of one row, from its (warp, output) partial sums."""
        sums = memory.load_float(partial[0, None], part, width)
        for warp in range(1, WARPS):
            sums = sums + memory.load_float(partial[warp, None], part, width)
        return sums

    def _gate(self, sums: cute.TensorSSA, gate_values: cute.TensorSSA, sees_keys) -> cute.TensorSSA:
        """BF16(BF16(sums) * sigmoid(gate)), or zeros for a row that sees no key."""
        value = sums.to(BFloat16).to(Float32)
        result = cute.make_rmem_tensor(value.shape, Float32)
        for place in range(cute.size(value.shape)):
            product = value[place] * sigmoid(gate_values[place], self.sigmoid)
            result[place] = scalar.select(sees_keys, product, Float32(0.0))
        return result.load().to(BFloat16)
