"""dsa_dcp on 2 ranks; the output is AttnRes of the saved blocks and the new residual stream.

Generated from pipelines/dsa_dcp_d2_attnres.yaml; do not edit.
"""

from .layer import DsaDcpD2AttnresLayer

__all__ = ["DsaDcpD2AttnresLayer"]
