"""Clusters: CTAs that start together and read each other's shared memory."""

from __future__ import annotations

from cutlass import Float32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from . import memory

WIDTH = 4
"""FP32 words of a remote load."""

_LOAD = (
    "{ .reg .b32 place; mapa.shared::cluster.u32 place, $4, $5; "
    "ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [place]; }"
)


def sync() -> None:
    """Barrier over all threads of the cluster; what lies before it is visible behind it."""
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


@dsl_user_op
def load_float(row: cute.Tensor, index, rank, *, loc=None, ip=None) -> cute.TensorSSA:
    """The `index`-th run of WIDTH FP32 of `row` in the shared memory of the CTA of that rank.

    `row` is this CTA's own piece of shared memory, aligned to 16 bytes; the CTAs of a cluster lay
    it out alike. The peer must have started and must not end before: both sides call `sync`
    ahead of the first read and behind the last one.
    """
    place = memory.vector_at(row, index, WIDTH).iterator.toint()
    result = llvm.inline_asm(
        ir.Type.parse("!llvm.struct<(f32, f32, f32, f32)>"),
        [place.ir_value(loc=loc, ip=ip), cute.Int32(rank).ir_value(loc=loc, ip=ip)],
        _LOAD,
        "=f,=f,=f,=f,r,r,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    words = cute.make_rmem_tensor((WIDTH,), Float32)
    number = Float32.mlir_type
    for word in range(WIDTH):
        words[word] = Float32(llvm.extractvalue(number, result, [word], loc=loc, ip=ip))
    return words.load()
