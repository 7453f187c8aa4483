"""Shared by every test: one torch thread, so that parallel workers do not fight for cores, and
property tests that do not judge by the clock of a busy machine."""

from __future__ import annotations

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
