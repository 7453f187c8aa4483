"""The tools around a build, found without importing the compiler: its version, a linker, and the
library that objects call."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from kpipe.runtime.aot.manifest import BuildError

LINKERS = ("cc", "gcc", "clang")
LIBRARY = "libcute_dsl_runtime.so"
_VERSION = re.compile(r'^__version__ = "([^"]+)"', re.MULTILINE)


class ToolMissing(BuildError):
    """Something that has to be installed on this machine is not."""


def dsl_version() -> str:
    """Version of the installed CuTe DSL, empty without one; nothing of it is imported."""
    found = _VERSION.search(init.read_text()) if (init := _dsl_file()) else None
    return found[1] if found else ""


def linker() -> str:
    """A C compiler that links.  Raises ToolMissing without one."""
    for name in LINKERS:
        if path := shutil.which(name):
            return path
    raise ToolMissing(
        f"no linker: none of {', '.join(LINKERS)} is here; install a C compiler where kernels are "
        "built (none is needed where they are loaded)"
    )


def link(program: str, relocatable: Path, shared: Path) -> None:
    """A shared library of one relocatable object.

    What it calls of CUDA and of TVM-FFI is found among the libraries of the process that loads
    it, all of it at once.  Raises BuildError with what the linker says.
    """
    wishes = ("--unresolved-symbols=ignore-all", "-z,noexecstack", "-z,now", "--build-id=none")
    command = [program, "-shared", "-nostdlib", "-s", *(f"-Wl,{wish}" for wish in wishes)]
    done = subprocess.run(
        [*command, "-o", str(shared), str(relocatable)], capture_output=True, text=True
    )
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise BuildError(f"{program} cannot link: {said[-1] if said else done.returncode}")


@cache
def load_runtime_library() -> None:
    """Makes the functions that objects call known in this process; once is enough.

    Raises ToolMissing without the library.
    """
    import torch
    import tvm_ffi  # noqa: F401 - brings its own functions with it

    init = _dsl_file()
    # Torch without CUDA runs none of them: there either will do.
    majors = [torch.version.cuda.partition(".")[0]] if torch.version.cuda else ["13", "12"]
    wanted = [f"cu{major}/lib/{LIBRARY}" for major in majors]
    paths = [init.parents[2] / name for name in wanted] if init else []
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        raise ToolMissing(
            f"{wanted[0]} is not installed: objects of a build call it; install "
            f"nvidia-cutlass-dsl[cu{majors[0]}]"
        )
    ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


def _dsl_file() -> Path | None:
    spec = importlib.util.find_spec("cutlass")
    return Path(spec.origin) if spec is not None and spec.origin else None
