"""CuTe-DSL kernels of dsa_dcp_d2_projected, one per file.

Generated from pipelines/dsa_dcp_d2_projected.yaml; do not edit.
"""
