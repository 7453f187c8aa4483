"""NVLink multicast stays off: the transport of a group of processes is stores to single peers.

The variables are read when NCCL, NVSHMEM and torch's symmetric memory start, so they must stand
before CUDA does.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from kpipe.runtime.metadata import LayerError

OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


def turn_off(environment: MutableMapping[str, str]) -> None:
    """Sets what is absent; LayerError where a variable asks for multicast."""
    for name, value in OFF.items():
        if environment.setdefault(name, value) != value:
            raise LayerError(
                f"{name} is {environment[name]!r}: ranks exchange words by stores to single peers, "
                f"with NVLink multicast off; set it to {value} or leave it out"
            )
