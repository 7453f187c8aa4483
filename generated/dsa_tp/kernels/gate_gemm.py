"""Generated from pipelines/dsa_tp.yaml; do not edit.

The output gate's columns of the packed projection, for every row:

    gate = BF16(hidden . packed[GATE_COLUMN:]^T)        OUTPUTS columns, FP32 accumulation

Only the value reads them: a layer may make them on another stream while its middle leaves memory
idle.

Grid     (ceil(OUTPUTS / tile_n), ceil(rows / tokens)): a CTA makes tile_n outputs of up to
         `tokens` rows.
Loads    A ring in shared memory: one warp has the copy engine bring weights, others copy rows
         by cp.async, the rest multiply. Tile, ring and order of the sum: see the device module
         `skinny`.
Wait     As much of packed as the ring holds is requested before it, everything else behind it.
         Released once the last rows are requested.
Rounding to BF16 once.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import cute

from kpipe.runtime.device import memory, pdl, skinny
from kpipe.runtime.host.compile import Symbol, TensorSpec

INPUTS = 7168
OUTPUTS = 1536
PITCH = 3808  # elements from one packed row to the next, and rows of packed
GATE_COLUMN = 2112  # where the gate begins in a packed row

BF16_BYTES = 2
GATE_ALIGN = BF16_BYTES * memory.vector_width(BF16_BYTES, PITCH, GATE_COLUMN)


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    return (
        TensorSpec("hidden", "bf16", (rows, INPUTS)),
        TensorSpec("packed", "bf16", (PITCH, INPUTS)),
        TensorSpec("gate", "bf16", (rows, OUTPUTS), (PITCH, 1), align=GATE_ALIGN),
    )


@dataclass(frozen=True)
class GateGemm:
    """gate = BF16(hidden . packed[GATE_COLUMN:]^T).

    release: let the dependent grid start once this one's loads are requested.
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    tile_n:  outputs of a CTA, a multiple of 8.
    tokens:  rows of a CTA: 8, 16, 32 or 64. Any number of rows may be launched; the
             smallest that holds them all is the fastest.
    ring:    KiB of the ring; what it leaves, a CTA of the next kernel may take.
    window:  KiB of weights that are on their way at a time; 0: all that fit the ring.

    Raises ValueError for a tile that the kernel is not written for.
    """

    release: bool = True
    pdl: bool = True
    tile_n: int = 32
    tokens: int = 64
    ring: int = skinny.MOST_SHARED
    window: int = 0

    def __post_init__(self) -> None:
        self._product()

    def _product(self) -> skinny.SkinnyGemm:
        return skinny.SkinnyGemm(
            OUTPUTS, INPUTS, self.tile_n, self.tokens, self.ring, window=self.window
        )

    @cute.jit
    def __call__(self, hidden: cute.Tensor, packed: cute.Tensor, gate: cute.Tensor, stream):
        product = self._product()
        layout = cute.make_layout((OUTPUTS, INPUTS), stride=(INPUTS, 1))
        weights = cute.make_tensor(cute.domain_offset((GATE_COLUMN, 0), packed).iterator, layout)
        self.gate_gemm(hidden, product.weight_map(weights), gate).launch(
            grid=product.grid(hidden.shape[0]),
            block=[product.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def gate_gemm(self, hidden: cute.Tensor, packed, gate: cute.Tensor):
        product = self._product()
        ring = product.make_ring()
        sums = product.zero_sums()
        warp = cute.arch.warp_idx()

        if warp == skinny.REQUESTING_WARP:
            product.request_weights(ring, packed)
        cute.arch.sync_threads()  # the barriers of the ring are ready
        if warp == skinny.REQUESTING_WARP:
            product.request_rest(ring, packed)
        pdl.wait()
        if product.multiplies(warp):
            product.multiply(ring, sums)
        elif product.copies(warp):
            product.copy_tokens(ring, hidden)
            if cutlass.const_expr(self.release):
                pdl.release()
        cute.arch.sync_threads()  # the ring is read to its end: sums may take its place
        if product.multiplies(warp):
            product.keep(ring, sums)
        cute.arch.sync_threads()
        product.store(ring, gate)
