"""CuTe-DSL kernels of dsa_tp_ds, one per file.

Generated from pipelines/dsa_tp_ds.yaml; do not edit.
"""
