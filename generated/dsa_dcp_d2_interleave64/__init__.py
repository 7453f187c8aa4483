"""dsa_dcp on 2 ranks; a rank holds 64 tokens in a row, the next one the following 64.

Generated from pipelines/dsa_dcp_d2_interleave64.yaml; do not edit.
"""

from .layer import DsaDcpD2Interleave64Layer

__all__ = ["DsaDcpD2Interleave64Layer"]
