"""How many rows fit into an exchange buffer that rotates through rings.

A buffer of `total_bytes` is cut into `rings` parts, each rounded down to `align` bytes; one call
uses one part.  Whoever decides whether a step may use the exchange and whoever lays the buffer
out must agree, so both ask here.
"""

from __future__ import annotations


class ExchangeTooSmall(ValueError):
    """A step has more rows than one ring of the exchange holds."""


def ring_bytes(total_bytes: int, rings: int, align: int) -> int:
    """Bytes of one ring: floor(total_bytes / rings), rounded down to a multiple of `align`."""
    return total_bytes // rings // align * align


def rows_that_fit(total_bytes: int, rings: int, align: int, row_bytes: int) -> int:
    """Rows of `row_bytes` that one ring holds."""
    return ring_bytes(total_bytes, rings, align) // row_bytes


def total_bytes_for(rows: int, rings: int, align: int, row_bytes: int) -> int:
    """The smallest multiple of `rings * align` bytes in which `rows` rows fit into each ring."""
    return rings * (-(-rows * row_bytes // align) * align)


def check_rows(rows: int, total_bytes: int, rings: int, align: int, row_bytes: int) -> None:
    """Raises ExchangeTooSmall, naming both sizes in bytes, unless `rows` rows fit."""
    if rows > rows_that_fit(total_bytes, rings, align, row_bytes):
        raise ExchangeTooSmall(
            f"{rows} rows need {rows * row_bytes} bytes per ring, "
            f"have {ring_bytes(total_bytes, rings, align)} ({total_bytes} / {rings}, aligned)"
        )
