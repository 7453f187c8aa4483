"""Pydantic's errors as diagnostics with a place, the allowed words and a suggestion."""

from __future__ import annotations

import types
import typing
from typing import Any, Literal

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kpipe.codegen.diagnostics import Diagnostic, SpecError, did_you_mean
from kpipe.codegen.edits import replace_word
from kpipe.codegen.spec.document import find
from kpipe.codegen.spec.load import Source, plain

# Keys of earlier drafts of the language, with what replaces them.
_RENAMED = {
    "overlap_mode": "overlap: {modes, table}",
    "core": "variants: {core: ...}",
    "arch": "targets",
    "target": "targets",
    "dimensions": "geometry",
}


def validate(model: type[BaseModel], source: Source) -> Any:
    """The model of a source.  Raises SpecError with one diagnostic per error."""
    try:
        return model.model_validate(plain(source.root))
    except ValidationError as error:
        found = [_diagnostic(model, source, item) for item in _distinct(model, error.errors())]
        raise SpecError(found) from None


def _distinct(model: type[BaseModel], items: list[Any]) -> list[dict[str, Any]]:
    """Errors without the branches of a union: `number or text` fails once, not twice."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in items:
        loc = item["loc"]
        if item["type"] == "too_short" and item["input"]:
            continue  # its entries are refused, each at its place
        if len(loc) > 1 and loc[-1] in ("int", "str") and _is_union(_annotation(model, loc[:-1])):
            item = {**item, "loc": loc[:-1], "type": "expression_type"}
            loc = loc[:-1]
        found.setdefault((loc, item["type"]), item)
    return list(found.values())


def _is_union(annotation: Any) -> bool:
    return {int, str} <= set(typing.get_args(annotation))


def _diagnostic(model: type[BaseModel], source: Source, item: Any) -> Diagnostic:
    loc = tuple(part for part in item["loc"] if part != "[key]")
    kind = item["type"]
    where = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        return _unknown_key(model, source, loc)
    if kind == "missing":
        return _missing_key(model, source, loc)
    if kind == "literal_error":
        words = tuple(str(w) for w in typing.get_args(_annotation(model, loc)) or ())
        expected = item["ctx"]["expected"]
        words = words or tuple(w.strip(" '") for w in expected.replace(" or ", ", ").split(","))
        given = str(item["input"])
        near = did_you_mean(given, words)
        hint = f"did you mean `{near}`?" if near else ""
        message = f"`{_short(given)}` is not a value of `{where}`"
        if given in words:
            message, hint = f"`{where}` is the number {given}, not text", f"write {given} unquoted"
            near = ""
        span = source.span(*loc)
        fix = replace_word(source.texts, span, given, near) if near else ()
        return Diagnostic("KP102", message, span, allowed=words, help=hint, fix=fix)
    if kind == "string_pattern_mismatch":
        message = (
            f"`{_short(item['input'])}` is not a name: lower-case letters, digits and _, a letter "
            "first"
        )
        return Diagnostic("KP101", message, source.span(*loc, key="[key]" in item["loc"]))
    if kind == "reserved":
        span = source.span(*loc, key="[key]" in item["loc"])
        return Diagnostic("KP101", item["msg"], span, help="choose another name")
    message = f"`{where}`: {_sentence(item)}"
    return Diagnostic("KP101", message, source.span(*loc), help=_repair(item))


def _missing_key(model: type[BaseModel], source: Source, loc: tuple[Any, ...]) -> Diagnostic:
    place = source.span(*loc[:-1], key=len(loc) > 1)
    owner = f"`{'.'.join(str(p) for p in loc[:-1])}`" if loc[:-1] else "the specification"
    field = _fields(model, loc[:-1]).get(str(loc[-1]))
    words = [str(w) for w in typing.get_args(field.annotation)] if field else []
    literal = field is not None and typing.get_origin(field.annotation) is Literal
    hint = f"add `{loc[-1]}: ...`"
    if field is not None and field.description:
        hint += f" ({field.description})"
    return Diagnostic(
        "KP101",
        f"{owner} lacks the key `{loc[-1]}`",
        place,
        allowed=tuple(words) if literal else (),
        help=hint,
    )


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "expression_type": "a whole number or a shape expression",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def _sentence(item: Any) -> str:
    kind, given = item["type"], item["input"]
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        return f"expected {words} {item['ctx'][key]}, got `{_short(given)}`"
    if kind == "too_short":
        return "expected at least one entry, got none"
    if kind in ("too_long", "string_too_long"):
        limit, what = item["ctx"]["max_length"], "characters" if kind[0] == "s" else "entries"
        return f"expected at most {limit} {what}, got {len(given)}"
    if kind == "doc":
        return item["msg"]
    expected = _EXPECTED.get(kind)
    if expected is None:
        message = item["msg"]
        return message[0].lower() + message[1:] + f" (got `{_short(given)}`)"
    return f"expected {expected}, got {_kind(given)}"


def _repair(item: Any) -> str:
    """What to write instead, where the written value shows what was meant."""
    kind, given = item["type"], item["input"]
    if kind == "doc":
        return "use 'single quotes'"
    if isinstance(given, str):
        switches = {"on": "true", "yes": "true", "true": "true"}
        switches |= {"off": "false", "no": "false", "false": "false"}
        if kind == "bool_type" and given.lower() in switches:
            return f"write {switches[given.lower()]}, without quotes"
        if kind in ("int_type", "float_type") and _is_number(given):
            return f"write {given} without quotes"
        if kind == "tuple_type":
            return f"write [{given}]"
    number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if kind == "string_type" and number:
        return f'write "{_short(given)}"'
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (tuple, list)):
        return "a list"
    quoted = isinstance(value, str)
    return f"the text `{_short(value)}`" if quoted else f"`{_short(value)}`"


def _short(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else getattr(value, "raw", str(value))
    return text if len(text) <= 40 else text[:37] + "..."


def _unknown_key(model: type[BaseModel], source: Source, loc: tuple[Any, ...]) -> Diagnostic:
    fields = tuple(_fields(model, loc[:-1]))
    word, near = str(loc[-1]), ""
    where = ".".join(str(part) for part in loc[:-1])
    place = f" in `{where}`" if where else ""
    if not where and word in _RENAMED:
        hint = f"it is now `{_RENAMED[word]}`"
    else:
        near = did_you_mean(word, fields)
        hint = f"did you mean `{near}`?" if near else "delete it"
    span = source.span(*loc, key=True)
    message = f"unknown key `{word}`{place}"
    free = near and find(source.root, (*loc[:-1], near)) is None
    fix = replace_word(source.texts, span, word, near) if free else ()
    return Diagnostic("KP101", message, span, allowed=fields, help=hint, fix=fix)


def _fields(model: type[BaseModel], loc: tuple[Any, ...]) -> dict[str, FieldInfo]:
    """Fields of the model at a path, by the name that a file uses."""
    owner = _model(_annotation(model, loc))
    if owner is None:
        return {}
    return {f.alias or name: f for name, f in owner.model_fields.items()}


def _model(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation is, or may be (`Model | None`)."""
    choices = (annotation,)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        choices = typing.get_args(annotation)
    return next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _annotation(model: type[BaseModel], loc: tuple[Any, ...]) -> Any:
    """The type annotation at a path below a model."""
    annotation: Any = model
    for part in loc:
        owner = _model(annotation)
        if owner is not None:
            by_alias = {f.alias or name: f for name, f in owner.model_fields.items()}
            field = by_alias.get(str(part))
            annotation = field.annotation if field else None
        elif typing.get_origin(annotation) in (dict, tuple):
            arguments = typing.get_args(annotation)
            annotation = arguments[1 if typing.get_origin(annotation) is dict else 0]
        else:
            annotation = None
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
    return annotation
