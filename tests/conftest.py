"""Shared by every test: one torch thread, so that parallel workers do not fight for cores,
property tests that do not judge by the clock of a busy machine, a collector of garbage that
does not walk again and again through what stays until the end, and one cache for a run: what a
worker has proved is proved for the others, and nothing of an earlier run is believed."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not IS_WORKER:  # they have it from the process that starts them
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


def pytest_unconfigure(config: pytest.Config) -> None:
    """The cache goes with the run."""
    if not IS_WORKER:
        shutil.rmtree(os.environ["KPIPE_CACHE_DIR"], ignore_errors=True)
