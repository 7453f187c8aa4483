"""The dynamic symbols of a 64-bit little-endian shared library, read from its bytes."""

from __future__ import annotations

import struct
from pathlib import Path

DYNAMIC_SYMBOLS = 11  # SHT_DYNSYM
UNDEFINED = 0  # SHN_UNDEF


def exported(path: Path) -> set[str]:
    """Names that the library defines for others."""
    return {name for name, section in _symbols(path.read_bytes()) if section != UNDEFINED}


def needed(path: Path) -> set[str]:
    """Names that it takes from others."""
    return {name for name, section in _symbols(path.read_bytes()) if section == UNDEFINED} - {""}


def _symbols(data: bytes) -> list[tuple[str, int]]:
    assert data[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    (start,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # name, type, flags, address, offset, size, link, info, align, entry size
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, start + i * size) for i in range(count)]
    found = []
    for header in headers:
        if header[1] == DYNAMIC_SYMBOLS:
            names = headers[header[6]][4]
            for place in range(header[4], header[4] + header[5], 24):
                name, _, _, section = struct.unpack_from("<IBBH", data, place)
                text = data[names + name : data.index(b"\0", names + name)].decode()
                found.append((text, section))
    return found
