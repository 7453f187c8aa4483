"""CuTe-DSL kernels of dsa_dcp_modes, one per file.

Generated from pipelines/dsa_dcp_modes.yaml; do not edit.
"""
