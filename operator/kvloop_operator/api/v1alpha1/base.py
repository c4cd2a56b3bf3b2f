"""What every model of the resource shares: strictness, rules in two languages, and bounded types."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, TypeGuard

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema, PydanticCustomError

from kvloop_operator.api.v1alpha1.patterns import ABSOLUTE_PATH, DNS_LABEL, DNS_SUBDOMAIN, KEY


@dataclass(frozen=True, slots=True)
class Rule:
    """What one field cannot say, once in CEL for the API server and once in Python for everybody else.

    cel: an expression over ``self``, true where the rule holds; defaults are filled in before it runs.
    holds: the same in Python.
    field: path of wire names below the object that the rule stands on; empty means the object itself.
    """

    cel: str
    holds: Callable[[Any], bool]
    field: str
    fault: str
    remedy: str
    entries: Callable[[Any], Sequence[int | str]] | None = None
    """Which entries of the list or map at ``field`` break the rule; None where the field as a whole does."""

    def broken_at(self, part: Any) -> list[tuple[str | int, ...]]:
        """Paths below ``part`` at which the rule is broken."""
        if self.holds(part):
            return []
        field = tuple(self.field.split(".")) if self.field else ()
        return [field] if self.entries is None else [(*field, entry) for entry in self.entries(part)]

    def validation(self) -> dict[str, str]:
        """The rule as an entry of ``x-kubernetes-validations``."""
        validation = {"rule": self.cel, "message": f"{self.fault}; {self.remedy}"}
        # The schema says nothing about metadata, so that no path can lead there.
        if self.field and not self.field.startswith("metadata."):
            validation["fieldPath"] = f".{self.field}"
        return validation


class Part(BaseModel):
    """A part of the resource: unknown fields refused, types never converted, wire names in camelCase."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        allow_inf_nan=False,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )

    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        broken = [(rule, path) for rule in self.rules for path in rule.broken_at(self)]
        if broken:
            raise PydanticCustomError("rule", "a rule does not hold", {"broken": broken})
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        own = handler.resolve_ref_schema(schema)
        if cls.rules:
            own["x-kubernetes-validations"] = [rule.validation() for rule in cls.rules]
        return schema


def defaulted(part: type[Part]) -> Any:
    """A field whose default is the part with all of its own defaults."""
    return Field(default_factory=part, json_schema_extra={"default": {}})


def unique(key: str) -> AfterValidator:
    """Refuses a list in which two entries have the same ``key`` (the Python name of the field)."""

    def check(items: tuple[Any, ...]) -> tuple[Any, ...]:
        seen: set[str] = set()
        for item in items:
            value = getattr(item, key)
            if value in seen:
                raise PydanticCustomError(
                    "duplicate_key", "two entries have the same key", {"key": to_camel(key), "value": value}
                )
            seen.add(value)
        return items

    return AfterValidator(check)


def keyed_list(key: str, maximum: int) -> Any:
    """A list that server-side apply merges by ``key``, so that two writers can own an entry each."""
    return Field(
        max_length=maximum,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [to_camel(key)]},
    )


QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][0-9]+)?$"
_MAXIMUM_QUANTITY_LENGTH = 32


def _is_whole(value: object) -> TypeGuard[int]:
    """Whether the API server sees a whole number: beyond 64 bits it takes none for one."""
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _quantity(value: object) -> int | str:
    if _is_whole(value) and value >= 0:
        return value
    if isinstance(value, str) and len(value) <= _MAXIMUM_QUANTITY_LENGTH and re.fullmatch(QUANTITY_PATTERN, value):
        return value
    raise PydanticCustomError("quantity", "not a quantity")


Quantity = Annotated[
    int | str,
    PlainValidator(_quantity),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "minimum": 0,
            "maxLength": _MAXIMUM_QUANTITY_LENGTH,
        }
    ),
]
"""A Kubernetes quantity that is not negative: ``4``, ``500m``, ``64Gi``."""

PERCENT_PATTERN = r"^(100|[1-9]?[0-9])%$"


def _count_or_percent(value: object) -> int | str:
    if _is_whole(value) and value >= 0:
        return value
    if isinstance(value, str) and re.fullmatch(PERCENT_PATTERN, value):
        return value
    raise PydanticCustomError("count_or_percent", "neither a count nor a percentage")


CountOrPercent = Annotated[
    int | str,
    PlainValidator(_count_or_percent),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": PERCENT_PATTERN, "minimum": 0, "maxLength": 4}),
]
"""A number of pods, or a percentage of them: ``1``, ``25%``."""

_MAXIMUM_FREE_LENGTH = 1024


def _whole_or_text(value: object) -> int | str:
    if _is_whole(value):
        return value
    if isinstance(value, str) and len(value) <= _MAXIMUM_FREE_LENGTH:
        return value
    raise PydanticCustomError("whole_or_text", "neither a whole number nor text")


WholeOrText = Annotated[
    int | str,
    PlainValidator(_whole_or_text),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": _MAXIMUM_FREE_LENGTH}),
]

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
VolumeName = Annotated[str, Field(min_length=1, max_length=63, pattern=DNS_LABEL)]
Key = Annotated[str, Field(min_length=1, max_length=253, pattern=KEY)]
ShortText = Annotated[str, Field(min_length=1, max_length=253)]
AbsolutePath = Annotated[str, Field(min_length=1, max_length=1024, pattern=ABSOLUTE_PATH)]
Labels = Annotated[Mapping[str, Annotated[str, Field(max_length=63)]], Field(max_length=64)]
Annotations = Annotated[Mapping[str, Annotated[str, Field(max_length=4096)]], Field(max_length=64)]
Arguments = Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=64)]
Seconds = Annotated[int, Field(ge=0, le=86400)]
