"""Lets every kernel launch with an SM's shared memory as large as it gets.

A CTA runs beside another one only if the SM's memory was divided for both of them: the driver
divides it for the kernel that comes to an idle SM first, and for that kernel alone. A grid whose
CTAs need little then keeps out those of its dependent grid that need much, though there is room:
`o_proj` did not start beside the value (docs/decisions/0021). The division is an attribute of a
launch; CuTe DSL has a `preferred_smem_carveout` for it and does not hand it over through TVM-FFI.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PERCENT = 100


@contextmanager
def whole_shared_memory() -> Iterator[None]:
    """Within it, `cute.compile` gives every launch the attribute.

    Raises AttributeError where the compiler has no such attribute, or sets its launches up in
    another way.
    """
    from cutlass import Int32
    from cutlass.cutlass_dsl.cutlass import cuda_dialect

    carve_out = cuda_dialect.launch_cfg_shared_mem_carveout
    set_cooperative = cuda_dialect.launch_cfg_cooperative

    def with_carve_out(config: Any, cooperative: Any, *, loc: Any = None, ip: Any = None) -> Any:
        carve_out(config, Int32(PERCENT).ir_value(loc=loc, ip=ip), loc=loc, ip=ip)
        return set_cooperative(config, cooperative, loc=loc, ip=ip)

    cuda_dialect.launch_cfg_cooperative = with_carve_out
    try:
        yield
    finally:
        cuda_dialect.launch_cfg_cooperative = set_cooperative
