"""CuTe-DSL kernels of dsa_tp, one per file.

Generated from pipelines/dsa_tp.yaml; do not edit.
"""
