"""How much of an SM's memory a launch wants as shared memory: all of it.

An SM changes its split between L1 cache and shared memory only while it is idle. A kernel that
leaves the split to the driver gets one that fits its own need, and as long as a CTA of it is there
no CTA of a kernel with more shared memory can start beside it, however much is free. Kernels of a
layer overlap, so they all ask for the same split.

CuTe DSL's `preferred_smem_carveout` becomes an attribute of the function that calls through TVM-FFI
never set (4.8.1), so the attribute of the launch is added here. It has an operation for that and
offers no other way to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PERCENT = 100


@contextmanager
def carved() -> Iterator[None]:
    """Launches of kernels that are compiled inside ask for PERCENT of an SM's memory."""
    from cutlass.cutlass_dsl import Int32
    from cutlass.cutlass_dsl.cutlass import cuda_dialect

    last = cuda_dialect.launch_cfg_cooperative  # the last attribute that the compiler sets

    def with_carveout(launch: Any, value: Any, *, loc: Any = None, ip: Any = None) -> Any:
        percent = Int32(PERCENT).ir_value(loc=loc, ip=ip)
        cuda_dialect.launch_cfg_shared_mem_carveout(launch, percent, loc=loc, ip=ip)
        return last(launch, value, loc=loc, ip=ip)

    cuda_dialect.launch_cfg_cooperative = with_carveout
    try:
        yield
    finally:
        cuda_dialect.launch_cfg_cooperative = last
