"""CuTe-DSL kernels of dsa_dcp, one per file.

Generated from pipelines/dsa_dcp.yaml; do not edit.
"""
