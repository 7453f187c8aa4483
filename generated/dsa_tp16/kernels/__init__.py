"""CuTe-DSL kernels of dsa_tp16, one per file.

Generated from pipelines/dsa_tp16.yaml; do not edit.
"""
