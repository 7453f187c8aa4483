"""Python source as text: names of dimensions, and calls laid out as the formatter would."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from kpipe.codegen.plan.dims import SYMBOLS
from kpipe.codegen.spec.expressions import Binary, Call, Expression, Name, Number, parse

WIDTH = 100


def constant(name: str) -> str:
    """The module constant that holds a dimension."""
    return name.upper()


def axis_source(text: str) -> str:
    """A shape expression as Python: sizes of a step stay text, dimensions become constants."""
    expression = parse(text)
    if isinstance(expression, Name) and expression.name in SYMBOLS:
        return f'"{expression.name}"'
    return _source(expression)


def _source(expression: Expression) -> str:
    if isinstance(expression, Number):
        return str(expression.value)
    if isinstance(expression, Name):
        return constant(expression.name)
    if isinstance(expression, Binary):
        operator = "//" if expression.operator == "/" else expression.operator
        left, right = _operand(expression.left, operator), _operand(expression.right, operator)
        return f"{left} {operator} {right}"
    assert isinstance(expression, Call)
    first, second = _source(expression.left), _source(expression.right)
    if expression.function == "ceil_div":
        return f"-(-({first}) // ({second}))"
    if expression.function == "round_up":
        return f"-(-({first}) // ({second})) * ({second})"
    return f"{expression.function}({first}, {second})"


def _operand(expression: Expression, operator: str) -> str:
    nested = isinstance(expression, Binary) and not (
        operator in "+-" and expression.operator in "*/"
    )
    return f"({_source(expression)})" if nested else _source(expression)


def names_of(texts: Iterable[str]) -> tuple[str, ...]:
    """Dimension names that occur in these expressions, without sizes of a step."""
    from kpipe.codegen.spec.expressions import names_in

    found = {name for text in texts for name in names_in(parse(text))}
    return tuple(sorted(found - set(SYMBOLS)))


def tuple_source(items: Sequence[str]) -> str:
    """A tuple literal."""
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def laid_out(head: str, arguments: Sequence[str], tail: str, indent: int) -> str:
    """`head(arguments)tail` on one line where it fits, else the arguments on one line of their
    own, else one argument per line: what the formatter does."""
    pad = " " * indent
    together = ", ".join(arguments)
    if len(f"{pad}{head}({together}){tail}") <= WIDTH:
        return f"{pad}{head}({together}){tail}"
    if len(f"{pad}    {together}") <= WIDTH:
        return f"{pad}{head}(\n{pad}    {together}\n{pad}){tail}"
    inner = "".join(f"{pad}    {argument},\n" for argument in arguments)
    return f"{pad}{head}(\n{inner}{pad}){tail}"


def commented(code: str, comment: str) -> str:
    """Code with a comment behind it where the line has room, else on the lines above."""
    if not comment:
        return code
    if len(f"{code.rpartition(chr(10))[2]}  # {comment}") <= WIDTH:
        return f"{code}  # {comment}"
    indent = len(code) - len(code.lstrip(" "))
    prefix = f"{' ' * indent}# "
    above = textwrap.wrap(comment, WIDTH, initial_indent=prefix, subsequent_indent=prefix)
    return "\n".join((*above, code))
