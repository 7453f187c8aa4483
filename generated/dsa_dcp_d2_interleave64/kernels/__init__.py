"""CuTe-DSL kernels of dsa_dcp_d2_interleave64, one per file.

Generated from pipelines/dsa_dcp_d2_interleave64.yaml; do not edit.
"""
