"""dsa_tp_ds with FlashMLA's core (package flash_mla), whose tiles have 64 heads, and a value GEMM of torch.

Generated from pipelines/dsa_tp_flashmla.yaml; do not edit.
"""

from .layer import DsaTpFlashmlaLayer

__all__ = ["DsaTpFlashmlaLayer"]
