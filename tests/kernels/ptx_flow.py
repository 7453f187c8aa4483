"""Reads PTX far enough to tell which global accesses lie behind the PDL wait.

Two facts are computed per access: the kernel parameters that its address derives from (every
register is followed back through the instructions that define it), and whether every path from
the entry to it passes a `griddepcontrol.wait`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WAIT = "griddepcontrol.wait"
RELEASE = "griddepcontrol.launch_dependents"

_REGISTER = re.compile(r"%[a-z]+\d+")
# Plain accesses have one address; of a copy into shared memory the second one is global, or
# that of the parameter which describes the tensor.
_ACCESS = re.compile(
    r"(?:@!?%p\d+\s+)?"
    r"(?:(ld|st)(?:\.relaxed\.sys)?\.global\S*\s.*?\[([^\]]+)\]"
    r"|(cp\.async)\S*\.shared\S*\.global\S*\s+\[[^\]]+\], \[([^\],]+))"
)
_PARAMETER = re.compile(r"_param_(\d+)(\+\d+)?[\];]")
_BRANCH = re.compile(r"(@!?%p\d+ )?bra(\.uni)?\s+(\$\w+);")


@dataclass(frozen=True)
class GlobalAccess:
    """One global load, store or bulk copy into shared memory: its text, its parameters, whether a
    wait dominates it."""

    text: str
    parameters: frozenset[int]
    waited: bool
    is_load: bool


def global_accesses(ptx: str) -> list[GlobalAccess]:
    """Every global access of the only kernel in `ptx`, in the order of the text."""
    lines = _body(ptx)
    sources = _register_sources(lines)
    waited = _behind_wait(lines)
    found = []
    for number, line in enumerate(lines):
        match = _ACCESS.match(line)
        if match:
            address = _REGISTER.findall(match[2] or match[4])
            parameters = frozenset().union(*(sources.get(name, frozenset()) for name in address))
            found.append(GlobalAccess(line, parameters, waited[number], match[1] != "st"))
    return found


def parameter_registers(ptx: str, parameter: int, offset: int) -> set[str]:
    """Registers that `ld.param` fills from one word of a parameter."""
    suffix = f"_param_{parameter}+{offset}]" if offset else f"_param_{parameter}]"
    loads = [line for line in _body(ptx) if line.startswith("ld.param") and suffix in line]
    return {name for line in loads for name in _REGISTER.findall(line)}


def _body(ptx: str) -> list[str]:
    """Instructions and labels of the kernel, without comments."""
    text = ptx[ptx.index("\n{") + 2 : ptx.rindex("}")]
    lines = (line.split("//")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(".reg")]


def _register_sources(lines: list[str]) -> dict[str, frozenset[int]]:
    """Register -> parameters that its value derives from, loads from memory cut off."""
    sources: dict[str, frozenset[int]] = {}
    for line in lines:
        names = _REGISTER.findall(line)
        if not names or line.startswith(
            ("ld.global", "ld.relaxed", "ld.shared", "st.", "cp.async", "prefetch", "@")
        ):
            continue
        parameter = _PARAMETER.search(line)
        held = parameter and not parameter[2]  # sizes and strides stand behind the address
        own = frozenset({int(parameter[1])}) if held else frozenset()
        inherited = (sources.get(name, frozenset()) for name in names[1:])
        sources[names[0]] = own.union(*inherited)
    return sources


def _behind_wait(lines: list[str]) -> list[bool]:
    """For each line: does every path from the entry to it pass a wait?

    Greatest fixed point: everything is assumed to be behind a wait until a path says otherwise.
    """
    labels = {line[:-1]: number for number, line in enumerate(lines) if line.endswith(":")}
    behind = [True] * len(lines)
    pending = [(0, False)]
    seen: set[tuple[int, bool]] = set()
    while pending:
        number, waited = pending.pop()
        if number >= len(lines) or (number, waited) in seen:
            continue
        seen.add((number, waited))
        behind[number] = behind[number] and waited
        line = lines[number]
        waited = waited or line == f"{WAIT};"
        branch = _BRANCH.match(line)
        if branch:
            pending.append((labels[branch[3]], waited))
        if line != "ret;" and not (branch and branch[1] is None):
            pending.append((number + 1, waited))
    return behind
