"""Kimi K3.1 sparse-attention decode layer, tensor parallel; every rank holds the whole context.

Generated from pipelines/dsa_tp.yaml; do not edit.
"""

from .layer import DsaTpLayer

__all__ = ["DsaTpLayer"]
