"""The version of kpipe; every other place reads it from here."""

from __future__ import annotations

__version__ = "0.1.0"
