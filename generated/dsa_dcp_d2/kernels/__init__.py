"""CuTe-DSL kernels of dsa_dcp_d2, one per file.

Generated from pipelines/dsa_dcp_d2.yaml; do not edit.
"""
