"""One case a kernel: random operands of a launch, and the oracle that judges what it made of them.

A case builds the operands (outputs poisoned, NaN in every padded place, strided views) on the
device and judges the outputs there, in float64, or in float32 where bits are compared.
"""
