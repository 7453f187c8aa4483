"""What a sender does to its values so that none of their words is a mailbox's sentinel.

All functions work on bits and return a new tensor of the same shape and dtype; values that need
no change keep every bit (subnormals and signs included).  Each is a projection: applying it twice
is the same as once, so a pattern can be sent exactly when the function leaves it alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# LSE of a row without keys on the wire: finite, so that it can never look like a NaN sentinel,
# and far below every real LSE.
EMPTY_LSE = -3.0e38
# Id of a place without a candidate; real ids are not negative.
EMPTY_ID = -(1 << 31)

NEG_ZERO_PAIR = 0x80000000  # the 2-byte halves (+0, -0), or the fp32 -0
ALL_ONES = 0xFFFFFFFF

Sanitiser = Callable[[torch.Tensor], torch.Tensor]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CANONICAL_NAN = {
    torch.bfloat16: 0x7FC0,
    torch.float16: 0x7E00,
    torch.float32: 0x7FC00000,
    torch.float8_e4m3fn: 0x7F,
}


def clear_negative_zero(values: torch.Tensor) -> torch.Tensor:
    """BF16, FP16 or FP32 values with every -0 turned into +0; all other bits stay."""
    bits = values.view(_BITS[values.dtype.itemsize])
    negative_zero = torch.iinfo(bits.dtype).min
    return torch.where(bits == negative_zero, 0, bits).view(values.dtype)


def canonicalise_nan(values: torch.Tensor) -> torch.Tensor:
    """Floating values with every NaN turned into the positive quiet NaN without payload.

    BF16 0x7FC0, FP16 0x7E00, FP32 0x7FC00000, E4M3 0x7F.  A saturating E4M3 conversion on the
    device yields 0x7F for every NaN; a conversion that keeps the sign yields 0xFF for some.
    """
    bits = values.view(_BITS[values.dtype.itemsize])
    # The comparison is exact for NaNs of every width; E4M3 has no isnan of its own.
    is_nan = values.to(torch.float32).isnan()
    return torch.where(is_nan, _CANONICAL_NAN[values.dtype], bits).view(values.dtype)


def sanitise_lse(lse: torch.Tensor) -> torch.Tensor:
    """FP32 log-sum-exp values for the wire: NaN, infinities and |x| >= 3e38 become EMPTY_LSE."""
    empty = torch.tensor(EMPTY_LSE, dtype=torch.float32, device=lse.device)
    usable = (lse > empty) & (lse < -empty)  # false for NaN
    return torch.where(usable, lse, empty)


def sanitise_scores(scores: torch.Tensor) -> torch.Tensor:
    """FP32 scores of candidates: NaN becomes -inf, so that it ranks last and is no sentinel."""
    lowest = torch.tensor(float("-inf"), dtype=torch.float32, device=scores.device)
    return torch.where(scores.isnan(), lowest, scores)


_SANITISERS: dict[tuple[torch.dtype, int], Sanitiser] = {
    (torch.bfloat16, NEG_ZERO_PAIR): clear_negative_zero,
    (torch.float16, NEG_ZERO_PAIR): clear_negative_zero,
    (torch.float32, NEG_ZERO_PAIR): clear_negative_zero,
    (torch.bfloat16, ALL_ONES): canonicalise_nan,
    (torch.float16, ALL_ONES): canonicalise_nan,
    (torch.float8_e4m3fn, ALL_ONES): canonicalise_nan,
    (torch.float32, ALL_ONES): sanitise_lse,
}


def sanitiser_for(dtype: torch.dtype, sentinel: int) -> Sanitiser:
    """The function that keeps values of `dtype` from producing the word `sentinel`.

    Raises ValueError where there is none.
    """
    try:
        return _SANITISERS[dtype, sentinel]
    except KeyError:
        raise ValueError(f"no sanitiser keeps {dtype} from producing 0x{sentinel:08X}") from None


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 2^8 or 2^16 values of a 1- or 2-byte dtype, in the order of their bits.

    Raises ValueError for a wider dtype.
    """
    if dtype.itemsize > 2:
        raise ValueError(f"{dtype} has 2^{8 * dtype.itemsize} patterns")
    patterns = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    return patterns.to(_BITS[dtype.itemsize]).view(dtype)


def can_produce(dtype: torch.dtype, sentinel: int, sanitise: Sanitiser | None = None) -> bool:
    """Whether some sanitised values of `dtype` form the 32-bit word `sentinel`.

    `sanitise` is the one of `sanitiser_for` by default; without one every word can occur.  For 1-
    and 2-byte dtypes the answer rests on all patterns: the word occurs exactly when each of its
    bytes or halves is a result of `sanitise`.  For 4-byte dtypes it rests on `sanitise` being a
    projection: the word occurs exactly when it is left alone.
    """
    if sanitise is None:
        sanitise = _SANITISERS.get((dtype, sentinel))
    if sanitise is None:
        return True
    bits = _BITS[dtype.itemsize]
    signed = sentinel - (1 << 32) if sentinel >= 1 << 31 else sentinel
    word = torch.tensor([signed], dtype=torch.int32)
    parts = word.view(bits)
    if dtype.itemsize == 4:
        return bool((sanitise(word.view(dtype)).view(bits) == parts).all())
    produced = sanitise(every_pattern(dtype)).view(bits)
    return bool(torch.isin(parts, produced).all())
