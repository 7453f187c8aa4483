"""Kimi K3.1 sparse-attention decode layer, contexts sharded over the tensor-parallel ranks (DCP).

Generated from pipelines/dsa_dcp_d4.yaml; do not edit.
"""

from .layer import DsaDcpD4Layer

__all__ = ["DsaDcpD4Layer"]
