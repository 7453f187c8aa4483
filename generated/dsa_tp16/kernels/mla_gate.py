"""Generated from pipelines/dsa_tp16.yaml; do not edit.

Output gate of the latent attention, where a library GEMM has made the values.

    gated = BF16(values * sigmoid(gate)), exactly 0 for a row that sees no key

Row i of request r sees max(lengths[r] - q + 1 + i, 0) keys, with q = rows / requests; the zero is
selected, so a padded row may hold anything.

Grid     (HEADS * V_DIM / (VECTOR * THREADS), rows); every thread owns VECTOR neighbouring outputs
         of one head.
Wait     nothing is read before it. Released once the loads are issued.
Rounding once, to BF16, at the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from cutlass import BFloat16, Float32, cute

from kpipe.runtime.device import memory, pdl, scalar
from kpipe.runtime.device.sigmoid import MODES, sigmoid
from kpipe.runtime.host.compile import Symbol, TensorSpec

HEADS = 6
V_DIM = 128
PITCH = 3040  # elements from one packed row to the next
GATE_COLUMN = 2112  # where the gate begins in a packed row

BF16_BYTES = 2
VECTOR = memory.vector_width(BF16_BYTES, V_DIM, PITCH, GATE_COLUMN)
HEAD_PARTS = V_DIM // VECTOR
ROW_PARTS = HEADS * HEAD_PARTS
MAX_THREADS = 64  # several CTAs a row, so that few rows fill the GPU
THREADS = gcd(ROW_PARTS, MAX_THREADS)


def operands() -> tuple[TensorSpec, ...]:
    """Tensors of a launch, in the order of the arguments."""
    rows = Symbol("rows")
    # The values of a head lie as many rows apart as the largest step has.
    head_pitch = Symbol("head_pitch", multiple=V_DIM)
    align = BF16_BYTES * VECTOR
    return (
        TensorSpec("values", "bf16", (HEADS, rows, V_DIM), (head_pitch, V_DIM, 1), align=align),
        TensorSpec("gate", "bf16", (rows, HEADS * V_DIM), (PITCH, 1), align=align),
        TensorSpec("lengths", "i32", (None,), align=4),
        TensorSpec("gated", "bf16", (rows, HEADS * V_DIM), align=align),
    )


@dataclass(frozen=True)
class MlaGate:
    """gated = BF16(values * sigmoid(gate)), zero for rows without keys.

    release: let the dependent grid start once this one's loads are issued.
    pdl:     launch with the attribute that lets this grid start before its predecessor ends.
    sigmoid: refined, exact or fast; see the device function.
    """

    release: bool = True
    pdl: bool = True
    sigmoid: str = "refined"

    def __post_init__(self) -> None:
        if self.sigmoid not in MODES:
            raise ValueError(f"unknown sigmoid {self.sigmoid!r}; choose from {', '.join(MODES)}")

    @cute.jit
    def __call__(
        self,
        values: cute.Tensor,
        gate: cute.Tensor,
        lengths: cute.Tensor,
        gated: cute.Tensor,
        stream,
    ):
        self.mla_gate(values, gate, lengths, gated).launch(
            grid=[ROW_PARTS // THREADS, gate.shape[0], 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=self.pdl,
        )

    @cute.kernel
    def mla_gate(
        self,
        values: cute.Tensor,
        gate: cute.Tensor,
        lengths: cute.Tensor,
        gated: cute.Tensor,
    ):
        block, row, _ = cute.arch.block_idx()
        part = block * THREADS + cute.arch.thread_idx()[0]
        head, head_part = part // HEAD_PARTS, part % HEAD_PARTS
        queries = gate.shape[0] // lengths.shape[0]
        later_queries = queries - 1 - row % queries

        pdl.wait()
        value = memory.vector_at(values[head, row, None], head_part, VECTOR).load()
        gate_values = memory.vector_at(gate[row, None], part, VECTOR).load()
        length = lengths[row // queries]
        if self.release:
            pdl.release()

        outputs = self._gate(value.to(Float32), gate_values.to(Float32), length > later_queries)
        memory.vector_at(gated[row, None], part, VECTOR).store(outputs)

    def _gate(self, value: cute.TensorSSA, gate_values: cute.TensorSSA, sees_keys):
        """BF16(value * sigmoid(gate)), or zeros for a row that sees no key."""
        result = cute.make_rmem_tensor(value.shape, Float32)
        for place in range(cute.size(value.shape)):
            product = value[place] * sigmoid(gate_values[place], self.sigmoid)
            result[place] = scalar.select(sees_keys, product, Float32(0.0))
        return result.load().to(BFloat16)
