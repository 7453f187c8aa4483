"""A folder for what can be computed again: compiled templates, verdicts of explorations.

The only setting is `KPIPE_CACHE_DIR`; nothing that is kept there changes any output.
"""

from __future__ import annotations

import os


def cache_folder(name: str) -> str | None:
    """The named folder of the cache, made on first use; None where none can be had."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.path.join(os.environ.get("KPIPE_CACHE_DIR") or os.path.join(home, "kpipe"), name)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
