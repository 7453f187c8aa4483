"""`@frozen` beside the standard decorator: the same class body, made twice."""

from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from kpipe.codegen.frozen import frozen

Decorator = Callable[[type], type]


def made(decorate: Decorator) -> type:
    """One class body with everything that a field can have."""

    class Body:
        """A body."""

        first: int
        second: tuple[str, ...] = ("a", "'\n")
        third: dict[str, int] = dataclasses.field(default_factory=dict, hash=False)
        aside: object = dataclasses.field(default=None, compare=False)
        hidden: str = dataclasses.field(default="h", repr=False)

        @property
        def twice(self) -> int:
            """Methods of the body stay."""
            return 2 * self.first

    return decorate(Body)


OURS = made(frozen)
STANDARD = made(dataclasses.dataclass(frozen=True))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((1,), {}),
        ((1, ("b",)), {"hidden": "x"}),
        ((), {"first": 2, "third": {"a": 1}, "aside": 7}),
        ((3, (), {"b": 2}, 8, "y"), {}),
    ],
)
def test_objects_are_those_of_the_standard_decorator(given: Any, named: Any) -> None:
    ours, standard = OURS(*given, **named), STANDARD(*given, **named)
    assert repr(ours) == repr(standard)
    assert hash(ours) == hash(standard)
    assert dataclasses.asdict(ours) == dataclasses.asdict(standard)
    assert ours.twice == standard.twice
    assert vars(dataclasses.replace(ours, first=9)) == vars(dataclasses.replace(standard, first=9))


@pytest.mark.parametrize(
    "change", [{"first": 2}, {"second": ()}, {"third": {"a": 1}}, {"aside": 1}, {"hidden": "x"}]
)
def test_equality_compares_the_same_fields(change: dict[str, Any]) -> None:
    def equal(cls: type) -> bool:
        return cls(1) == dataclasses.replace(cls(1), **change)

    assert equal(OURS) == equal(STANDARD)
    assert OURS(1) == OURS(1)
    assert OURS(1) != STANDARD(1)
    assert OURS(1) != 1


@pytest.mark.parametrize("cls", [OURS, STANDARD])
def test_nothing_can_be_set_or_deleted(cls: type) -> None:
    one = cls(1)
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'first'"):
        one.first = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'first'"):
        del one.first
    assert one.first == 1


@pytest.mark.parametrize("cls", [OURS, STANDARD])
def test_wrong_calls_are_refused(cls: type) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'first'"):
        cls()
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        cls(1, other=2)


def test_factories_are_called_for_each_object() -> None:
    assert OURS(1).third is not OURS(1).third


def test_order_of_arguments_and_patterns() -> None:
    assert list(inspect.signature(OURS).parameters) == list(inspect.signature(STANDARD).parameters)
    assert OURS.__match_args__ == STANDARD.__match_args__


@frozen
class Single:
    """One field: its hash and equality are still those of a tuple."""

    only: float


@frozen
class Empty:
    """No field at all."""


def test_one_field_and_none() -> None:
    assert hash(Single(1.5)) == hash((1.5,))
    assert Single(float("nan")) != Single(float("nan"))
    assert Empty() == Empty()
    assert repr(Empty()) == "Empty()"
    assert pickle.loads(pickle.dumps(Single(2.0))) == Single(2.0)
