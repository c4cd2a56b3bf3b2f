"""Answers in a form that the request prescribes: the arguments of a tool that must be called, or structured output.

An engine lets a grammar choose the tokens. The simulated model's words follow none: they are what the form is filled
with, as soon as the answer ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_NOTHING: Final[dict[str, Any]] = {"number": 0, "integer": 0, "boolean": False, "null": None}


@dataclass(frozen=True, slots=True)
class Shape:
    """JSON of ``schema``. tool: whose arguments it is, or None. named: the request named that very tool."""

    schema: Mapping[str, Any]
    tool: str | None = None
    named: bool = False

    @property
    def finish_reason(self) -> str:
        """Why an answer of this form ends."""
        return "tool_calls" if self.tool is not None and not self.named else "stop"

    def text(self, words: str) -> str:
        """The form, filled with ``words``."""
        return json.dumps(_filled(self.schema, words.strip(), self.schema), ensure_ascii=False)


def shape_of(body: Mapping[str, Any]) -> Shape | None:
    """The form that a chat request prescribes; None where it does not."""
    choice = body.get("tool_choice")
    functions = [tool.get("function") or {} for tool in body.get("tools") or () if isinstance(tool, Mapping)]
    if functions and (choice == "required" or isinstance(choice, Mapping)):
        named = isinstance(choice, Mapping)
        wanted = (choice.get("function") or {}).get("name") if isinstance(choice, Mapping) else functions[0].get("name")
        found = next((function for function in functions if function.get("name") == wanted), functions[0])
        return Shape(found.get("parameters") or {}, str(found.get("name")), named)
    form = body.get("response_format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return Shape((form.get("json_schema") or {}).get("schema") or {})
    return Shape({}) if isinstance(form, Mapping) and form.get("type") == "json_object" else None


def _filled(schema: Mapping[str, Any], words: str, root: Mapping[str, Any]) -> Any:
    if "$ref" in schema:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        schema = root.get("$defs", {}).get(name, {})
    for several in ("enum", "anyOf", "oneOf"):
        if schema.get(several):
            first = schema[several][0]
            return first if several == "enum" else _filled(first, words, root)
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "object")
    if kind == "string":
        return words
    if kind == "array":
        return [_filled(schema.get("items") or {"type": "string"}, words, root)]
    if kind == "object":
        return {name: _filled(each, words, root) for name, each in (schema.get("properties") or {}).items()}
    return _NOTHING.get(str(kind))
