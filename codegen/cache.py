"""A folder for what can be computed again, and the digest of the sources that computed it.

The only setting is `KPIPE_CACHE_DIR`; nothing that is kept there changes any output.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path


def cache_folder(name: str) -> str | None:
    """The named folder of the cache, made on first use; None where none can be had."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(os.environ.get("KPIPE_CACHE_DIR") or os.path.join(home, "kpipe"), name)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@cache  # the sources that are running do not change under a run
def tool_digest(folder: Path = Path(__file__).parent) -> str:
    """One digest over every Python source and table of kpipe.codegen, names included."""
    total = hashlib.sha256()
    names: list[str] = []
    for where, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        inner = os.path.relpath(where, folder).replace(os.sep, "/")
        names += [f"{inner}/{name}" for name in files if name.endswith((".py", ".json"))]
    for name in sorted(names):
        data = (folder / name).read_bytes()
        total.update(f"{name}\0{len(data)}\0".encode())
        total.update(data)
    return total.hexdigest()
