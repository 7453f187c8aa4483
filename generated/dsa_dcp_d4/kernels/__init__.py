"""CuTe-DSL kernels of dsa_dcp_d4, one per file.

Generated from pipelines/dsa_dcp_d4.yaml; do not edit.
"""
