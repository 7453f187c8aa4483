"""CuTe-DSL building blocks of the generated kernels: one concept a file, all of them inlined."""
