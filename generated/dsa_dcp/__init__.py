"""Kimi K3.1 sparse-attention decode layer, contexts sharded over the tensor-parallel ranks (DCP).

Generated from pipelines/dsa_dcp.yaml; do not edit.
"""

from .layer import DsaDcpLayer

__all__ = ["DsaDcpLayer"]
