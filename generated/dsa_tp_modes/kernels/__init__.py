"""CuTe-DSL kernels of dsa_tp_modes, one per file.

Generated from pipelines/dsa_tp_modes.yaml; do not edit.
"""
