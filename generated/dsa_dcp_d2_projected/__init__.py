"""dsa_dcp on 2 ranks; rows travel behind W_UV of all heads, 128 values of a head in place of 512.

Generated from pipelines/dsa_dcp_d2_projected.yaml; do not edit.
"""

from .layer import DsaDcpD2ProjectedLayer

__all__ = ["DsaDcpD2ProjectedLayer"]
