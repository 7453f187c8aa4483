"""CuTe-DSL kernels of dsa_dcp_d2_attnres, one per file.

Generated from pipelines/dsa_dcp_d2_attnres.yaml; do not edit.
"""
