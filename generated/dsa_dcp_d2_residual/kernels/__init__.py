"""CuTe-DSL kernels of dsa_dcp_d2_residual, one per file.

Generated from pipelines/dsa_dcp_d2_residual.yaml; do not edit.
"""
