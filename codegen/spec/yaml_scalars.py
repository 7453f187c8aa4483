"""Plain (unquoted) scalars: the YAML 1.2 core schema, one spelling each."""

from __future__ import annotations

import re

_WORDS: dict[str, bool | None] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INTEGER = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def plain_value(text: str) -> tuple[bool | int | float | str | None, str, str]:
    """Value of an unquoted scalar, and a finding's message and repair (both "" when fine)."""
    if text in _WORDS:
        return _WORDS[text], "", ""
    if text[0].isalpha():  # most scalars are names; spare them the patterns
        if text in ("True", "TRUE", "False", "FALSE", "Null", "NULL"):
            word = text.lower()
            repair = f'write {word}, or "{text}" if the text is meant'
            return _WORDS[word], f"`{text}` is not how {word} is spelled", repair
        return text, "", ""
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            return 0.0, f"`{text}` is too large for a 64-bit float", "write a smaller number"
        return value, "", ""
    if _NOT_FINITE.fullmatch(text):
        repair = f'write a finite number, or "{text}" if the text is meant'
        return 0.0, f"`{text}` is refused: numbers are finite", repair
    return text, "", ""


def _integer(text: str) -> tuple[int, str, str]:
    shown = text if len(text) <= 24 else text[:21] + "..."
    digits = text.lstrip("+-")
    if len(digits) > 1 and digits[0] == "0" and digits.isdecimal():
        sign = text[: len(text) - len(digits)]
        decimal = sign + (digits.lstrip("0") or "0")
        octal = f" or {sign}0o{digits[1:]}" if set(digits) <= set("01234567") and not sign else ""
        repair = f"write {decimal}{octal}" if len(text) <= 24 else "drop the leading zeros"
        return 0, f"`{shown}`: an integer does not start with 0", repair
    if len(text) > 24 or not -(1 << 63) <= (value := int(text, _base(digits))) < 1 << 64:
        return 0, f"`{shown}` does not fit into 64 bits", "write a smaller number, or quote it"
    return value, "", ""


def _base(digits: str) -> int:
    return {"0x": 16, "0o": 8}.get(digits[:2], 10)
