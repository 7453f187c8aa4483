"""Kimi K3.1 sparse-attention decode layer, tensor parallel; every rank holds the whole context.

Generated from pipelines/dsa_tp1.yaml; do not edit.
"""

from .layer import DsaTp1Layer

__all__ = ["DsaTp1Layer"]
