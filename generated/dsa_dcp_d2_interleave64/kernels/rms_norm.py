"""Generated from pipelines/dsa_dcp_d2_interleave64.yaml; do not edit.

RMS norm of the query's low-rank projection.

    rr  = rsqrt(sum(x * x) / Q_LORA + RMS_EPS)      FP32; division to nearest, fast rsqrt
    q_c = BF16((x * rr) * q_norm)                   two products in this order

Grid     one CTA a row; every thread owns VECTOR neighbouring elements.
Wait     q_norm is loaded before it, q_a behind it. Released right behind the wait.
Rounding once, to BF16, at the store.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import BFloat16, Float32, cute
from cutlass.memory import SmemAllocator

from kpipe.runtime.device import memory, pdl, reduce
from kpipe.runtime.host.compile import Symbol, TensorSpec

Q_LORA = 1536
PITCH = 8416  # elements from one packed row to the next
Q_A_COLUMN = 0  # where q_a begins in a packed row
RMS_EPS = 1e-06

BF16_BYTES = 2
VECTOR = memory.vector_width(BF16_BYTES, Q_LORA, PITCH, Q_A_COLUMN)
THREADS = Q_LORA // VECTOR
WARPS = THREADS // reduce.WARP


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    return (
        TensorSpec("q_a", "bf16", (rows, Q_LORA), (PITCH, 1), align=VECTOR * BF16_BYTES),
        TensorSpec("q_norm", "bf16", (Q_LORA,)),
        TensorSpec("q_c", "bf16", (rows, Q_LORA)),
    )


@dataclass(frozen=True)
class RmsNorm:
    """q_c = RMSNorm(q_a) * q_norm.

    release: let the dependent grid start right behind the wait (not where it reads q_c early).
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    """

    release: bool = True
    pdl: bool = True

    @cute.jit
    def __call__(self, q_a: cute.Tensor, q_norm: cute.Tensor, q_c: cute.Tensor, stream):
        self.rms_norm(q_a, q_norm, q_c).launch(
            grid=[q_a.shape[0], 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=self.pdl
        )

    @cute.kernel
    def rms_norm(self, q_a: cute.Tensor, q_norm: cute.Tensor, q_c: cute.Tensor):
        row = cute.arch.block_idx()[0]
        part = cute.arch.thread_idx()[0]
        partial = SmemAllocator().allocate_tensor(Float32, cute.make_layout(WARPS))

        weight = memory.load_float(q_norm, part, VECTOR)
        pdl.wait()
        if self.release:
            pdl.release()

        x = memory.load_float(q_a[row, None], part, VECTOR)
        squares = (x * x).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        mean = reduce.block_sum(squares, partial) / Float32(Q_LORA)
        rr = cute.math.rsqrt(mean + Float32(RMS_EPS), fastmath=True)
        y = (x * rr) * weight
        memory.vector_at(q_c[row, None], part, VECTOR).store(y.to(BFloat16))
