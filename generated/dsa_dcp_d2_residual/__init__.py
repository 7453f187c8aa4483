"""dsa_dcp on 2 ranks; the output is the new residual stream.

Generated from pipelines/dsa_dcp_d2_residual.yaml; do not edit.
"""

from .layer import DsaDcpD2ResidualLayer

__all__ = ["DsaDcpD2ResidualLayer"]
