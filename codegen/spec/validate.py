"""Pydantic's errors as diagnostics with a place, the allowed words and a suggestion."""

from __future__ import annotations

import typing
from typing import Any

from pydantic import BaseModel, ValidationError

from kpipe.codegen.diagnostics import Diagnostic, SpecError, did_you_mean
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
        found = tuple(_diagnostic(model, source, item) for item in error.errors())
        raise SpecError(found) from None


def _diagnostic(model: type[BaseModel], source: Source, item: Any) -> Diagnostic:
    loc = tuple(part for part in item["loc"] if part != "[key]")
    kind = item["type"]
    where = ".".join(str(part) for part in loc)
    if kind == "extra_forbidden":
        return _unknown_key(model, source, loc)
    if kind == "missing":
        place = source.span(*loc[:-1], key=len(loc) > 1)
        owner = f"`{'.'.join(str(p) for p in loc[:-1])}`" if loc[:-1] else "the specification"
        return Diagnostic("KP101", f"{owner} lacks the key `{loc[-1]}`", place)
    if kind == "literal_error":
        words = tuple(str(w) for w in typing.get_args(_annotation(model, loc)) or ())
        expected = item["ctx"]["expected"]
        words = words or tuple(w.strip(" '") for w in expected.replace(" or ", ", ").split(","))
        given = str(item["input"])
        near = did_you_mean(given, words)
        return Diagnostic(
            "KP102",
            f"`{given}` is not a value of `{where}`",
            source.span(*loc),
            allowed=words,
            help=f"did you mean `{near}`?" if near else "",
        )
    if kind == "string_pattern_mismatch":
        message = (
            f"`{item['input']}` is not a name: lower-case letters, digits and _, a letter first"
        )
        return Diagnostic("KP101", message, source.span(*loc, key="[key]" in item["loc"]))
    return Diagnostic("KP101", f"`{where}`: {_sentence(item)}", source.span(*loc))


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def _sentence(item: Any) -> str:
    expected = _EXPECTED.get(item["type"])
    if expected is None:
        message = item["msg"]
        return message[0].lower() + message[1:] + f" (got `{_short(item['input'])}`)"
    return f"expected {expected}, got {_kind(item['input'])}"


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
    text = getattr(value, "raw", None) or str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _unknown_key(model: type[BaseModel], source: Source, loc: tuple[Any, ...]) -> Diagnostic:
    fields = _fields(model, loc[:-1])
    word = str(loc[-1])
    where = ".".join(str(part) for part in loc[:-1])
    place = f" in `{where}`" if where else ""
    if word in _RENAMED:
        hint = f"it is now `{_RENAMED[word]}`"
    else:
        near = did_you_mean(word, fields)
        hint = f"did you mean `{near}`?" if near else ""
    span = source.span(*loc, key=True)
    return Diagnostic("KP101", f"unknown key `{word}`{place}", span, allowed=fields, help=hint)


def _fields(model: type[BaseModel], loc: tuple[Any, ...]) -> tuple[str, ...]:
    annotation = _annotation(model, loc)
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return tuple(f.alias or name for name, f in candidate.model_fields.items())
    return ()


def _annotation(model: type[BaseModel], loc: tuple[Any, ...]) -> Any:
    """The type annotation at a path below a model."""
    annotation: Any = model
    for part in loc:
        choices = (annotation, *typing.get_args(annotation))
        owner = next((c for c in choices if isinstance(c, type) and issubclass(c, BaseModel)), None)
        if owner is not None:
            by_alias = {f.alias or name: f for name, f in owner.model_fields.items()}
            field = by_alias.get(str(part))
            annotation = field.annotation if field else None
        elif typing.get_origin(annotation) in (dict, tuple):
            arguments = typing.get_args(annotation)
            annotation = arguments[1 if typing.get_origin(annotation) is dict else 0]
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
    return annotation
