"""BF16, E4M3 and UE8M0 as float64 arithmetic, without any narrow torch dtype.

Values stay float64 after rounding, so that one rounding is one rounding: nothing passes through
FP32 on the way.
"""

from __future__ import annotations

import torch

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
_BF16_MAX = (2.0 - 2.0**-7) * 2.0**127


def _round_significand(value: torch.Tensor, bits: int, lowest: int) -> torch.Tensor:
    """Rounds float64 to `bits` fraction bits, ties to even, with gradual underflow below
    2 ** lowest; NaN and infinities stay."""
    unit = (torch.frexp(value).exponent - 1).clamp(min=lowest) - bits
    count = torch.round(torch.ldexp(value, -unit))
    return torch.where(value.isfinite(), torch.ldexp(count, unit), value)


def round_bf16(value: torch.Tensor) -> torch.Tensor:
    """Nearest BF16 value of each float64 element (ties to even, overflow to inf), as float64."""
    rounded = _round_significand(value.double(), 7, -126)
    overflow = rounded.abs() > _BF16_MAX
    return torch.where(
        overflow, torch.copysign(torch.full_like(rounded, torch.inf), rounded), rounded
    )


def round_e4m3(value: torch.Tensor) -> torch.Tensor:
    """Nearest E4M3 value (ties to even), saturated to +-448; NaN stays NaN. float64 in and out."""
    return _round_significand(value.double(), 3, -6).clamp(-E4M3_MAX, E4M3_MAX)


def _e4m3_table() -> torch.Tensor:
    """Value of each of the 256 E4M3 bytes: 1 sign, 4 exponent (bias 7), 3 fraction bits."""
    values = []
    for byte in range(256):
        sign, exponent, fraction = byte >> 7, (byte >> 3) & 15, byte & 7
        if exponent == 15 and fraction == 7:
            magnitude = float("nan")
        elif exponent == 0:
            magnitude = fraction * 2.0**-9
        else:
            magnitude = (8 + fraction) * 2.0 ** (exponent - 10)
        values.append(-magnitude if sign else magnitude)
    return torch.tensor(values, dtype=torch.float64)


E4M3_VALUES = _e4m3_table()


def decode_e4m3(byte: torch.Tensor) -> torch.Tensor:
    """Value of each E4M3 byte: uint8 in, float64 out."""
    return E4M3_VALUES[byte.long()]


def _e4m3_edges() -> torch.Tensor:
    """The largest value that rounds to each magnitude but the last, by code.

    It is the middle of two neighbours where a tie goes down, to an even code, or right ahead of it.
    """
    magnitudes = E4M3_VALUES[:E4M3_NAN]
    middle = (magnitudes[:-1] + magnitudes[1:]) / 2
    odd = torch.arange(len(middle)) % 2 == 1
    return torch.where(odd, torch.nextafter(middle, torch.zeros(())), middle)


_E4M3_EDGES = _e4m3_edges()


def encode_e4m3(value: torch.Tensor) -> torch.Tensor:
    """Byte of each value after `round_e4m3`: uint8, NaN as 0x7F, never 0xFF.

    Codes of magnitudes ascend with them, so the code is the number of edges below the magnitude.
    """
    value = value.double()
    code = torch.bucketize(value.abs(), _E4M3_EDGES, out_int32=True).to(torch.uint8)
    code |= torch.signbit(value).to(torch.uint8) << 7
    return code.masked_fill_(value.isnan(), E4M3_NAN)


def power_of_two_at_least(value: torch.Tensor) -> torch.Tensor:
    """Smallest power of two that is not below each positive float64 element."""
    parts = torch.frexp(value.double())
    exponent = torch.where(parts.mantissa == 0.5, parts.exponent - 1, parts.exponent)
    return torch.ldexp(torch.ones_like(parts.mantissa), exponent)


def ue8m0_scale(values: torch.Tensor, floor: float) -> torch.Tensor:
    """Scale of the last dimension: max(amax, floor) / 448, rounded up to a power of two.

    float64 [..., n] in, float64 [...] out. `floor` bounds amax, not the scale.
    """
    return power_of_two_at_least(values.abs().amax(dim=-1).clamp(min=floor) / E4M3_MAX)
