"""dsa_tp over latents with a scale for every 128 of them (fp8_ds_mla); the query stays BF16.

Generated from pipelines/dsa_tp_ds.yaml; do not edit.
"""

from .layer import DsaTpDsLayer

__all__ = ["DsaTpDsLayer"]
