"""pydantic's errors in plain words: which field, what stands there, what is wrong, what to write instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from kvloop_operator.api.v1alpha1.base import Rule
from kvloop_operator.api.v1alpha1.patterns import FORMS
from kvloop_operator.errors import Fault

_MAXIMUM_SHOWN = 80

_TYPES = {
    "bool_type": ("not a boolean", "write true or false, without quotes"),
    "int_type": ("not a whole number", "write a whole number, without quotes"),
    "int_from_float": ("not a whole number", "write a whole number, without quotes"),
    "float_type": ("not a number", "write a number, without quotes"),
    "finite_number": ("not a number", "write a number, without quotes"),
    "string_type": ("not text", "put it in quotes"),
    "tuple_type": ("not a list", "write a list"),
    "dict_type": ("not a map", "write a map of names to values"),
    "mapping_type": ("not a map", "write a map of names to values"),
    "model_type": ("not a map", "write a map of fields"),
    "model_attributes_type": ("not a map", "write a map of fields"),
    "quantity": ("not a quantity", "write a Kubernetes quantity that is not negative, as 4, 500m or 64Gi"),
    "count_or_percent": ("neither a count nor a percentage", "write a whole number or, in quotes, a percentage"),
    "whole_or_text": ("neither a whole number nor text", "write a whole number, or put it in quotes"),
}

_BOUNDS: Mapping[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "greater_than": lambda c: (f"not greater than {c['gt']:g}", f"use more than {c['gt']:g}"),
    "greater_than_equal": lambda c: (f"less than {c['ge']}", f"use {c['ge']} or more"),
    "less_than_equal": lambda c: (f"greater than {c['le']}", f"use {c['le']} or less"),
    "string_too_short": lambda c: ("too short", f"use {c['min_length']} characters or more"),
    "string_too_long": lambda c: ("too long", f"use {c['max_length']} characters or fewer"),
    "too_short": lambda c: ("too few entries", f"use {c['min_length']} or more"),
    "too_long": lambda c: ("too many entries", f"use {c['max_length']} or fewer"),
    "string_pattern_mismatch": lambda c: (
        "malformed",
        f"write {FORMS[c['pattern']]}" if c["pattern"] in FORMS else f"match {c['pattern']}",
    ),
    "enum": lambda c: ("not one of the values that are possible", f"use {c['expected']}"),
    "literal_error": lambda c: ("not one of the values that are possible", f"use {c['expected']}"),
    "duplicate_key": lambda c: (f"two entries have the {c['key']} {c['value']}", "keep one of them"),
}


def path_of(location: Sequence[str | int]) -> str:
    """``('spec', 'prefill', 'args', 0)`` as ``spec.prefill.args[0]``."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def shown(value: object) -> str:
    """``value`` as JSON on one line, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAXIMUM_SHOWN else text[: _MAXIMUM_SHOWN - 1] + "…"


def value_at(document: Any, path: Sequence[str | int]) -> str:
    """What stands at ``path``, as JSON; ``(absent)`` where nothing does."""
    for step in path:
        if isinstance(document, Mapping) and step in document:
            document = document[str(step)]
        elif isinstance(document, list) and isinstance(step, int) and step < len(document):
            document = document[step]
        else:
            return "(absent)"
    return shown(document)


def faults_of(error: ValidationError, model: type[BaseModel], document: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Every fault in ``error``, in the order of the fields."""
    return tuple(fault for detail in error.errors() for fault in _faults(detail, model, document))


def _faults(detail: ErrorDetails, model: type[BaseModel], document: Mapping[str, Any]) -> Iterator[Fault]:
    location, context = detail["loc"], detail.get("ctx", {})
    if detail["type"] == "rule":
        broken: Sequence[tuple[Rule, Sequence[str | int]]] = context["broken"]
        for rule, path in broken:
            below = (*location, *path)
            yield Fault(path_of(below), value_at(document, below), rule.fault, rule.remedy)
        return
    fault, remedy = _words(detail["type"], context, location, model, detail["msg"])
    yield Fault(path_of(location), value_at(document, location), fault, remedy)


def _words(
    kind: str, context: Mapping[str, Any], location: Sequence[str | int], model: type[BaseModel], message: str
) -> tuple[str, str]:
    if kind == "missing":
        return "a required field is missing", "set it"
    if kind == "extra_forbidden":
        near = get_close_matches(str(location[-1]), _siblings(model, location[:-1]), n=1)
        return "unknown field", f"did you mean {near[0]}?" if near else "remove it"
    if kind in _TYPES:
        return _TYPES[kind]
    if kind in _BOUNDS:
        return _BOUNDS[kind](context)
    return message, "correct it"


def _siblings(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Wire names of the fields of the part at ``location``."""
    for step in location:
        if isinstance(step, int):
            continue
        below = [field.annotation for field in model.model_fields.values() if field.alias == step]
        parts = list(_parts(below[0])) if below else []
        if not parts:
            return []
        model = parts[0]
    return [field.alias or name for name, field in model.model_fields.items()]


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)
