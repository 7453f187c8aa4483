"""Generated from pipelines/dsa_dcp_d2.yaml; do not edit.

Query of the indexer, all heads of a row:

    index_q = BF16(q_c . index_q_b^T)        FP32 accumulation

Grid     (ceil(OUTPUTS / tile_n), ceil(rows / tokens)): a CTA makes tile_n outputs of up to
         `tokens` rows.
Loads    A ring in shared memory: one warp has the copy engine bring weights, others copy rows
         by cp.async, the rest multiply. Tile, ring and order of the sum: see the device module
         `skinny`.
Wait     As much of index_q_b as the ring holds is requested before it, everything else behind it.
         Released once the last rows are requested.
Rounding to BF16 once.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import cute

from kpipe.runtime.device import pdl, skinny
from kpipe.runtime.host.compile import Symbol, TensorSpec

INPUTS = 1536
OUTPUTS = 4096


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    return (
        TensorSpec("q_c", "bf16", (rows, INPUTS)),
        TensorSpec("index_q_b", "bf16", (OUTPUTS, INPUTS)),
        TensorSpec("index_q", "bf16", (rows, OUTPUTS)),
    )


@dataclass(frozen=True)
class IndexGemm:
    """index_q = BF16(q_c . index_q_b^T).

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
    def __call__(self, q_c: cute.Tensor, index_q_b: cute.Tensor, index_q: cute.Tensor, stream):
        product = self._product()
        self.index_gemm(q_c, product.weight_map(index_q_b), index_q).launch(
            grid=product.grid(q_c.shape[0]),
            block=[product.threads, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def index_gemm(self, q_c: cute.Tensor, index_q_b, index_q: cute.Tensor):
        product = self._product()
        ring = product.make_ring()
        sums = product.zero_sums()
        warp = cute.arch.warp_idx()

        if warp == skinny.REQUESTING_WARP:
            product.request_weights(ring, index_q_b)
        cute.arch.sync_threads()  # the barriers of the ring are ready
        if warp == skinny.REQUESTING_WARP:
            product.request_rest(ring, index_q_b)
        pdl.wait()
        if product.multiplies(warp):
            product.multiply(ring, sums)
        elif product.copies(warp):
            product.copy_tokens(ring, q_c)
            if cutlass.const_expr(self.release):
                pdl.release()
        cute.arch.sync_threads()  # the ring is read to its end: sums may take its place
        if product.multiplies(warp):
            product.keep(ring, sums)
        cute.arch.sync_threads()
        product.store(ring, index_q)
