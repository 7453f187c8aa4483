"""Host side of generated code: compiling, launching, streams, scratch. No import compiles."""
