"""dsa_dcp on two ranks with every mode in its table, for holding the modes against one another on a GPU; not for serving.

Generated from pipelines/dsa_dcp_modes.yaml; do not edit.
"""

from .layer import DsaDcpModesLayer

__all__ = ["DsaDcpModesLayer"]
