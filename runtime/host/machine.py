"""What a measurement was made on: the GPU, its driver, the versions of what ran there."""

from __future__ import annotations

import subprocess

import torch


def described() -> dict[str, object]:
    """GPU, architecture (`sm_90`), driver and versions of the machine's first GPU."""
    import cutlass

    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "arch": f"sm_{major}{minor}",
        "driver": driver_version(),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cutlass_dsl": cutlass.__version__,
        },
    }


def driver_version() -> str:
    """The driver's own version, for example 580.159.04; `unknown` where nothing tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    first = done.stdout.partition("\n")[0].strip()
    return first if done.returncode == 0 and first else "unknown"
