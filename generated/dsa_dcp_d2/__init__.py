"""Kimi K3.1 sparse-attention decode layer, contexts sharded over the tensor-parallel ranks (DCP).

Generated from pipelines/dsa_dcp_d2.yaml; do not edit.
"""

from .layer import DsaDcpD2Layer

__all__ = ["DsaDcpD2Layer"]
