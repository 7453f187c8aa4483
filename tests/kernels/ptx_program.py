"""The instructions of a kernel, read from its PTX."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_LINE = re.compile(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)")


@dataclass(frozen=True)
class Instruction:
    """`op` with its suffixes as words; `guard` is (negated, predicate) or None."""

    op: tuple[str, ...]
    operands: tuple[str, ...]
    guard: tuple[bool, str] | None
    text: str


@dataclass
class Program:
    """The instructions of a kernel; `labels` are places among them."""

    threads: int
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(ptx: str) -> Program:
    """The only kernel of `ptx`. Labels of inline assembly hold within its braces."""
    head, _, body = ptx.partition("\n{\n")
    program = Program(int(re.search(r"\.reqntid (\d+)", head)[1]))
    scope, scopes = "", 0
    for line in body.splitlines():
        line = line.partition("//")[0].strip()
        if line in ("{", "}"):
            scopes += line == "{"
            scope = f"@{scopes}" if line == "{" else ""
        elif line.endswith(":"):
            program.labels[line[:-1] + scope] = len(program.instructions)
        for text in line.split(";") if not line.startswith(".") and ";" in line else ():
            if match := _LINE.fullmatch(text.strip()):
                program.instructions.append(_instruction(match, scope))
    return program


def _instruction(match: re.Match, scope: str) -> Instruction:
    negated, predicate, op, rest = match.groups()
    operands = tuple(_TOKEN.findall(rest))
    if op.startswith("bra") and not operands[0].startswith("$"):
        operands = (operands[0] + scope,)
    guard = (bool(negated), predicate) if predicate else None
    return Instruction(tuple(op.split(".")), operands, guard, match[0])


def names_of(operand: str) -> list[str]:
    """The registers of a vector operand, or the only one."""
    return [name.strip() for name in operand.strip("{} ").split(",")]


def bits_of(kind: str) -> int:
    """Size of a type: 32 of `f32`."""
    return 16 if kind == "bf16" else int(kind.lstrip("bfsu"))
