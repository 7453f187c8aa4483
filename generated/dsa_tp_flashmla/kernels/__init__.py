"""CuTe-DSL kernels of dsa_tp_flashmla, one per file.

Generated from pipelines/dsa_tp_flashmla.yaml; do not edit.
"""
