"""Kimi K3.1 sparse-attention decode layer, tensor parallel; every rank holds the whole context.

Generated from pipelines/dsa_tp16.yaml; do not edit.
"""

from .layer import DsaTp16Layer

__all__ = ["DsaTp16Layer"]
