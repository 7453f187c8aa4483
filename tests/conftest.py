"""Shared by every test: one torch thread, so that parallel workers do not fight for cores,
property tests that do not judge by the clock of a busy machine, and a collector of garbage that
does not walk again and again through what stays until the end."""

from __future__ import annotations

import gc
import os
import tempfile

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
os.environ["KPIPE_CACHE_DIR"] = tempfile.mkdtemp(prefix="kpipe-tests-")
settings.register_profile(
    "kpipe", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("kpipe")


def pytest_collection_finish() -> None:
    """Modules and collected tests outlive every test: they are looked at no more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
