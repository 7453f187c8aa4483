"""Generated from pipelines/dsa_dcp_modes.yaml; do not edit.

All input projections of the layer in one product, a packed row for every row:

    projected = BF16(hidden . packed^T)        FP32 accumulation

Without the gate its columns keep what they hold, and their weights are not read: gate_gemm makes
them.

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

from kpipe.runtime.device import pdl, skinny
from kpipe.runtime.device.gapped import GappedGemm
from kpipe.runtime.host.compile import Symbol, TensorSpec

INPUTS = 7168
OUTPUTS = 8416
GATE_COLUMN = 2112  # where the gate begins in a packed row
GATE = 6144


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    return (
        TensorSpec("hidden", "bf16", (rows, INPUTS)),
        TensorSpec("packed", "bf16", (OUTPUTS, INPUTS)),
        TensorSpec("projected", "bf16", (rows, OUTPUTS)),
    )


@dataclass(frozen=True)
class PackedGemm:
    """projected = BF16(hidden . packed^T).

    release: let the dependent grid start once this one's loads are requested.
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    without_gate: leave its columns out.
    tile_n:  outputs of a CTA, a multiple of 8; without_gate: one that divides GATE_COLUMN and GATE.
    tokens:  rows of a CTA: 8, 16, 32 or 64. Any number of rows may be launched; the
             smallest that holds them all is the fastest.
    ring:    KiB of the ring; what it leaves, a CTA of the next kernel may take.
    window:  KiB of weights that are on their way at a time; 0: all that fit the ring.

    Raises ValueError for a tile that the kernel is not written for.
    """

    release: bool = True
    pdl: bool = True
    without_gate: bool = False
    tile_n: int = 32
    tokens: int = 64
    ring: int = skinny.MOST_SHARED
    window: int = 0

    def __post_init__(self) -> None:
        self._product()

    def _product(self) -> skinny.SkinnyGemm:
        shape = OUTPUTS, INPUTS, self.tile_n, self.tokens, self.ring
        if self.without_gate:
            return GappedGemm(*shape, GATE_COLUMN, GATE, window=self.window)
        return skinny.SkinnyGemm(*shape, window=self.window)

    @cute.jit
    def __call__(self, hidden: cute.Tensor, packed: cute.Tensor, projected: cute.Tensor, stream):
        product = self._product()
        self.packed_gemm(hidden, product.weight_map(packed), projected).launch(
            grid=product.grid(hidden.shape[0]),
            block=[product.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def packed_gemm(self, hidden: cute.Tensor, packed, projected: cute.Tensor):
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
        product.store(ring, projected)
