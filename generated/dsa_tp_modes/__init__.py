"""dsa_tp with every mode in its table, for holding the modes against one another on a GPU; not for serving.

Generated from pipelines/dsa_tp_modes.yaml; do not edit.
"""

from .layer import DsaTpModesLayer

__all__ = ["DsaTpModesLayer"]
