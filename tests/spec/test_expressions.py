"""Shape expressions against an independent oracle, and every error text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kpipe.codegen.spec.expressions import (
    Binary,
    Call,
    Expression,
    ExpressionError,
    Name,
    Number,
    evaluate,
    names_in,
    parse,
    to_text,
)

SIZES = {"heads": 96, "tp": 8, "v_dim": 128, "zero": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("heads*v_dim", 12288),
        ("heads / tp", 12),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("10-3-2", 5),
        ("64/4/2", 8),
        ("8-(3-2)", 7),
        ("ceil_div(heads, 7)", 14),
        ("round_up(heads + 1, 64)", 128),
        ("min(heads, tp) + max(1, 2)", 10),
        ("1 - heads", -95),
        ("(1 - heads) / 5", -19),
        ("ceil_div(0 - 7, 2)", -3),
        ("4611686018427387904", 1 << 62),
        ("((((((((((((((((((((1))))))))))))))))))))", 1),
    ],
)
def test_values(text: str, value: int) -> None:
    assert evaluate(parse(text), SIZES) == value


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("dcp*heads", "dcp * heads"),
        ("((a))", "a"),
        ("(a+b)*c", "(a + b) * c"),
        ("(a*b)+c", "a * b + c"),
        ("a-(b-c)", "a - (b - c)"),
        ("(a-b)-c", "a - b - c"),
        ("a*(b/c)", "a * (b / c)"),
        ("ceil_div((a+b),(8))", "ceil_div(a + b, 8)"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert to_text(parse(text)) == canonical
    assert to_text(parse(canonical)) == canonical


def test_names() -> None:
    assert names_in(parse("a * min(b_1, a) + 3")) == {"a", "b_1"}


@pytest.mark.parametrize(
    ("text", "message", "offset", "length"),
    [
        ("", "empty expression", 0, 0),
        ("  ", "empty expression", 0, 2),
        ("1 +", "the expression ends where a number, a name or `(` is expected", 2, 1),
        ("(1", "the expression ends where `)` is expected", 1, 1),
        ("1)", "expected an operator, found `)`", 1, 1),
        ("a b", "expected an operator, found `b`", 2, 1),
        ("-1", "expected a number, a name or `(`, found `-`", 0, 1),
        ("()", "expected a number, a name or `(`, found `)`", 1, 1),
        ("min(1)", "`min` has one argument: write min(a, b)", 0, 6),
        ("min(1, 2, 3)", "`min` has more than two arguments: write min(a, b)", 0, 9),
        ("min(1 2)", "expected `,`, found `2`", 6, 1),
        ("2 * min", "`min` is a function: write min(a, b)", 4, 3),
        ("round(1, 2)", "unknown function `round` (did you mean `round_up`?)", 0, 5),
        (
            "open(1, 2)",
            "unknown function `open` (there are ceil_div, max, min, round_up)",
            0,
            4,
        ),
        ("2 * Heads", "`Heads`: names are lower case, [a-z][a-z0-9_]*", 4, 5),
        ("a // b", "`//` is not an operator; use `/` (exact) or ceil_div(a, b)", 2, 2),
        ("a ** b", "`**` is not an operator; use `*`", 2, 2),
        (
            "a % b",
            "`%` is not part of an expression; allowed: integers, names, + - * / ( ) and "
            "ceil_div, max, min, round_up",
            2,
            1,
        ),
        ("012", "`012`: an integer does not start with 0", 0, 3),
        ("2x", "`2x` is neither a number nor a name", 0, 2),
        ("4611686018427387905", "`4611686018427387905` is beyond 2**62", 0, 19),
        ("(" * 21 + "1" + ")" * 21, "nested deeper than 20 levels", 20, 1),
        ("1+" * 100 + "1", "expression of 201 characters; the limit is 200", 0, 201),
    ],
)
def test_malformed_text(text: str, message: str, offset: int, length: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        parse(text)
    error = caught.value
    assert (error.message, error.offset, error.length) == (message, offset, length)


@pytest.mark.parametrize(
    "text", ["__import__('os')", "a.b", "a[0]", "lambda: 1", "'x'", "é", "a\nb"]
)
def test_python_is_not_a_shape(text: str) -> None:
    with pytest.raises(ExpressionError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "message", "offset", "length"),
    [
        ("1 + heads / 7", "heads / 7: 96 is not a multiple of 7", 4, 9),
        ("heads / zero", "heads / zero: division by zero", 0, 12),
        ("heads / (tp - 8)", "heads / (tp - 8): division by zero", 0, 16),
        (
            "ceil_div(heads, zero)",
            "ceil_div(heads, zero): the second argument is 0, it must be at least 1",
            0,
            21,
        ),
        (
            "round_up(1, 1 - 2)",
            "round_up(1, 1 - 2): the second argument is -1, it must be at least 1",
            0,
            18,
        ),
        ("2 * haeds", "unknown name `haeds` (did you mean `heads`?)", 4, 5),
        ("2 * xyzzy", "unknown name `xyzzy`", 4, 5),
        (
            "2 * 4611686018427387904",
            "2 * 4611686018427387904: the value is beyond 2**62",
            0,
            23,
        ),
    ],
)
def test_evaluation_errors(text: str, message: str, offset: int, length: int) -> None:
    with pytest.raises(ExpressionError) as caught:
        evaluate(parse(text), SIZES)
    error = caught.value
    assert (error.message, error.offset, error.length) == (message, offset, length)


def test_a_given_size_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ExpressionError, match=r"^a: the value is beyond 2\*\*62$"):
        evaluate(parse("a"), {"a": (1 << 62) + 1})


def test_zero_and_negative_results_are_refused_only_when_asked() -> None:
    assert evaluate(parse("tp - 8"), SIZES) == 0
    for text, message in [
        ("tp - 8", "tp - 8: 0 is not positive"),
        ("tp - 9", "tp - 9: -1 is not positive"),
    ]:
        with pytest.raises(ExpressionError) as caught:
            evaluate(parse(text), SIZES, positive=True)
        assert caught.value.message == message
    assert evaluate(parse("tp - 7"), SIZES, positive=True) == 1


LEAVES = st.one_of(st.integers(0, 40).map(Number), st.sampled_from(["a", "b_2", "rows"]).map(Name))


def _branches(children: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    return st.one_of(
        st.builds(Binary, st.sampled_from("+-*/"), children, children),
        st.builds(
            Call, st.sampled_from(["ceil_div", "round_up", "min", "max"]), children, children
        ),
    )


TREES = st.recursive(LEAVES, _branches, max_leaves=12)


def _oracle(tree: Expression, names: dict[str, int]) -> int | None:
    """Value by definition with divmod; None where the language has no value."""
    if isinstance(tree, Number):
        return tree.value
    if isinstance(tree, Name):
        return names[tree.name]
    left, right = _oracle(tree.left, names), _oracle(tree.right, names)
    if left is None or right is None:
        return None
    kind = tree.operator if isinstance(tree, Binary) else tree.function
    if kind in ("ceil_div", "round_up"):
        if right < 1:
            return None
        quotient, remainder = divmod(left, right)
        quotient += remainder > 0
        value = quotient if kind == "ceil_div" else quotient * right
    elif kind == "/":
        if right == 0 or divmod(left, right)[1]:
            return None
        value = divmod(left, right)[0]
    else:
        results = {"+": left + right, "-": left - right, "*": left * right}
        results |= {"min": sorted((left, right))[0], "max": sorted((left, right))[1]}
        value = results[kind]
    return value if -(2**62) <= value <= 2**62 else None


@given(TREES, st.fixed_dictionaries({name: st.integers(0, 200) for name in ("a", "b_2", "rows")}))
def test_text_and_value_agree_with_the_oracle(tree: Expression, names: dict[str, int]) -> None:
    assert parse(to_text(tree)) == tree
    expected = _oracle(tree, names)
    if expected is None:
        with pytest.raises(ExpressionError):
            evaluate(parse(to_text(tree)), names)
    else:
        assert evaluate(parse(to_text(tree)), names) == expected


@given(st.text(alphabet="ab1(),+-*/ _minA%", max_size=30))
def test_any_text_parses_or_gives_a_placed_error(text: str) -> None:
    try:
        tree = parse(text)
    except ExpressionError as error:
        assert 0 <= error.offset <= len(text)
        assert error.offset + error.length <= max(len(text), 1)
    else:
        assert parse(to_text(tree)) == tree
