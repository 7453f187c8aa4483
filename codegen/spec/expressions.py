"""Shape expressions: `heads * v_dim`, `ceil_div(rows_cap, 8)`.

    sum     := product (("+" | "-") product)*
    product := factor (("*" | "/") factor)*
    factor  := NUMBER | NAME | FUNCTION "(" sum "," sum ")" | "(" sum ")"

NUMBER is a plain decimal, NAME is [a-z][a-z0-9_]*, FUNCTION is ceil_div, round_up, min or max.
`/` is exact: a remainder is an error. A specification comes from a stranger, so there is no path
from here to Python's evaluator, and length, depth and values are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from kpipe.codegen.diagnostics import did_you_mean

LENGTH_LIMIT = 200  # characters without blanks, so that the canonical text always fits too
DEPTH_LIMIT = 20  # nested parentheses and calls
VALUE_LIMIT = 1 << 62  # keeps products of two int64 sizes honest
FUNCTIONS = ("ceil_div", "max", "min", "round_up")

_TOKEN = re.compile(r"[0-9]+|[a-z][a-z0-9_]*|[-+*/(),]")
_RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


class ExpressionError(ValueError):
    """An expression that cannot be read or has no value.

    `message` is one sentence; the trouble sits at `text[offset:offset + length]`.
    """

    def __init__(self, message: str, offset: int, length: int) -> None:
        super().__init__(message)
        self.message, self.offset, self.length = message, offset, length


@dataclass(frozen=True)
class Number:
    """A literal, from 0 to 2**62. Places do not take part in equality, here and below."""

    value: int
    offset: int = field(default=0, compare=False)
    length: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Name:
    """A dimension, looked up when evaluating."""

    name: str
    offset: int = field(default=0, compare=False)
    length: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Binary:
    """`left operator right` with operator one of + - * /."""

    operator: str
    left: Expression
    right: Expression
    offset: int = field(default=0, compare=False)
    length: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Call:
    """`function(left, right)` with one of FUNCTIONS."""

    function: str
    left: Expression
    right: Expression
    offset: int = field(default=0, compare=False)
    length: int = field(default=0, compare=False)


Expression = Number | Name | Binary | Call


@lru_cache(maxsize=1024)  # a plan asks for the same few shapes hundreds of times
def parse(text: str) -> Expression:
    """The expression written in `text`. Raises ExpressionError with the place of the trouble."""
    if len(text) - text.count(" ") > LENGTH_LIMIT:
        count = len(text) - text.count(" ")
        raise ExpressionError(
            f"expression of {count} characters; the limit is {LENGTH_LIMIT}", 0, len(text)
        )
    parser = _Parser(text)
    if parser.kind == "":
        raise ExpressionError("empty expression", 0, len(text))
    expression = parser.sum()
    if parser.kind:
        raise parser.unexpected("an operator")
    return expression


def evaluate(expression: Expression, names: Mapping[str, int], *, positive: bool = False) -> int:
    """The value of an expression, in exact integer arithmetic.

    Raises ExpressionError for a name that `names` lacks, a division that leaves a remainder or
    divides by zero, `ceil_div` or `round_up` to less than 1, any value beyond 2**62 and, with
    `positive=True`, a result below 1.
    """
    value = _value(expression, names)
    if positive and value < 1:
        shown = "" if isinstance(expression, Number) else f"{to_text(expression)}: "
        message = f"{shown}{value} is not positive"
        raise ExpressionError(message, expression.offset, expression.length)
    return value


def names_in(expression: Expression) -> frozenset[str]:
    """The dimensions that an expression reads."""
    return frozenset(node.name for node in _nodes(expression) if isinstance(node, Name))


def to_text(expression: Expression) -> str:
    """Canonical text: single blanks around operators, only the parentheses that are needed.

    `parse(to_text(expression)) == expression` for every expression that `parse` can return.
    """
    if isinstance(expression, Number):
        return str(expression.value)
    if isinstance(expression, Name):
        return expression.name
    left, right = to_text(expression.left), to_text(expression.right)
    if isinstance(expression, Call):
        return f"{expression.function}({left}, {right})"
    rank = _RANK[expression.operator]
    if _rank(expression.left) < rank:
        left = f"({left})"
    if _rank(expression.right) <= rank:  # operators group to the left
        right = f"({right})"
    return f"{left} {expression.operator} {right}"


def _rank(expression: Expression) -> int:
    return _RANK[expression.operator] if isinstance(expression, Binary) else 3


def _nodes(expression: Expression) -> Iterator[Expression]:
    yield expression
    if isinstance(expression, (Binary, Call)):
        yield from _nodes(expression.left)
        yield from _nodes(expression.right)


# --- values -------------------------------------------------------------------------------------


def _value(node: Expression, names: Mapping[str, int]) -> int:
    if isinstance(node, Number):
        value = node.value
    elif isinstance(node, Name):
        if node.name not in names:
            close = did_you_mean(node.name, names)
            hint = f" (did you mean `{close}`?)" if close else ""
            raise ExpressionError(f"unknown name `{node.name}`{hint}", node.offset, node.length)
        value = names[node.name]
    else:
        value = _combine(node, _value(node.left, names), _value(node.right, names))
    if abs(value) > VALUE_LIMIT:
        message = f"{to_text(node)}: the value is beyond 2**62"
        raise ExpressionError(message, node.offset, node.length)
    return value


def _combine(node: Binary | Call, left: int, right: int) -> int:
    def refuse(reason: str) -> ExpressionError:
        return ExpressionError(f"{to_text(node)}: {reason}", node.offset, node.length)

    if isinstance(node, Call):
        if node.function in ("ceil_div", "round_up") and right < 1:
            raise refuse(f"the second argument is {right}, it must be at least 1")
        return _CALLS[node.function](left, right)
    if node.operator == "/":
        if right == 0:
            raise refuse("division by zero")
        if left % right:
            raise refuse(f"{left} is not a multiple of {right}")
        return left // right
    if node.operator == "*":
        return left * right
    return left + right if node.operator == "+" else left - right


_CALLS: dict[str, Callable[[int, int], int]] = {
    "ceil_div": lambda left, right: -(-left // right),
    "max": max,
    "min": min,
    "round_up": lambda left, right: -(-left // right) * right,
}


# --- text ---------------------------------------------------------------------------------------


class _Parser:
    """Recursive descent over `text`; `kind` is the current token's text, "" at the end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.depth = 0
        self.end = 0  # just behind the last token taken
        self.offset, self.kind = 0, ""
        self._advance()

    def take(self) -> str:
        taken, self.end = self.kind, self.offset + len(self.kind)
        self._advance()
        return taken

    def _advance(self) -> None:
        position = self.end
        while self.text.startswith(" ", position):
            position += 1
        self.offset, self.kind = position, ""
        if position < len(self.text):
            match = _TOKEN.match(self.text, position)
            if match is None:
                raise self._foreign(position)
            self.kind = match[0]
            if self.text[position : position + 2] in ("//", "**"):
                pair = self.text[position : position + 2]
                use = "`/` (exact) or ceil_div(a, b)" if pair == "//" else "`*`"
                raise ExpressionError(f"`{pair}` is not an operator; use {use}", position, 2)

    def _foreign(self, position: int) -> ExpressionError:
        character = self.text[position]
        if character.isascii() and character.isalpha():
            word = re.match(r"\w+", self.text[position:], re.ASCII)
            assert word is not None
            message = f"`{word[0]}`: names are lower case, [a-z][a-z0-9_]*"
            return ExpressionError(message, position, len(word[0]))
        allowed = "integers, names, + - * / ( ) and " + ", ".join(FUNCTIONS)
        message = f"`{character}` is not part of an expression; allowed: {allowed}"
        return ExpressionError(message, position, 1)

    def unexpected(self, wanted: str) -> ExpressionError:
        if not self.kind:
            at = max(self.end - 1, 0)
            return ExpressionError(f"the expression ends where {wanted} is expected", at, 1)
        message = f"expected {wanted}, found `{self.kind}`"
        return ExpressionError(message, self.offset, len(self.kind))

    def sum(self) -> Expression:
        return self._chain("+-", lambda: self._chain("*/", self.factor))

    def _chain(self, operators: str, operand: Callable[[], Expression]) -> Expression:
        start = self.offset
        left = operand()
        while self.kind and self.kind in operators:
            operator = self.take()
            right = operand()
            left = Binary(operator, left, right, start, self.end - start)
        return left

    def factor(self) -> Expression:
        start = self.offset
        if self.kind.isdigit():
            return self._number(self.take(), start)
        if self.kind == "(":
            self._descend()
            inner = self.sum()
            self._close()
            return inner
        if not self.kind[:1].isalpha():
            raise self.unexpected("a number, a name or `(`")
        name = self.take()
        if self.kind == "(":
            return self._call(name, start)
        if name in FUNCTIONS:
            message = f"`{name}` is a function: write {name}(a, b)"
            raise ExpressionError(message, start, len(name))
        return Name(name, start, len(name))

    def _number(self, digits: str, start: int) -> Number:
        if len(digits) > 1 and digits[0] == "0":
            message = f"`{digits}`: an integer does not start with 0"
            raise ExpressionError(message, start, len(digits))
        if self.kind[:1].isalpha() and self.offset == self.end:
            message = f"`{digits}{self.kind}` is neither a number nor a name"
            raise ExpressionError(message, start, len(digits) + len(self.kind))
        if int(digits) > VALUE_LIMIT:
            raise ExpressionError(f"`{digits}` is beyond 2**62", start, len(digits))
        return Number(int(digits), start, len(digits))

    def _call(self, name: str, start: int) -> Call:
        if name not in FUNCTIONS:
            close = did_you_mean(name, FUNCTIONS)
            hint = f"did you mean `{close}`?" if close else f"there are {', '.join(FUNCTIONS)}"
            raise ExpressionError(f"unknown function `{name}` ({hint})", start, len(name))
        self._descend()
        left = self.sum()
        if self.kind != ",":
            self._wrong_count(name, start, 1)
        self.take()
        right = self.sum()
        if self.kind == ",":
            self._wrong_count(name, start, 3)
        self._close()
        return Call(name, left, right, start, self.end - start)

    def _wrong_count(self, name: str, start: int, count: int) -> None:
        if count == 1 and self.kind != ")":
            raise self.unexpected("`,`")
        given = "one argument" if count == 1 else "more than two arguments"
        message = f"`{name}` has {given}: write {name}(a, b)"
        raise ExpressionError(message, start, self.offset + 1 - start)

    def _descend(self) -> None:
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            message = f"nested deeper than {DEPTH_LIMIT} levels"
            raise ExpressionError(message, self.offset, 1)
        self.take()

    def _close(self) -> None:
        if self.kind != ")":
            raise self.unexpected("`)`")
        self.depth -= 1
        self.take()
