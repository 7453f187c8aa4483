"""CuTe-DSL kernels of dsa_tp1, one per file.

Generated from pipelines/dsa_tp1.yaml; do not edit.
"""
