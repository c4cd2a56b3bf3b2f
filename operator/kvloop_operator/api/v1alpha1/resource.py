"""A whole DisaggregatedInference, read from a document."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from kvloop_operator.api.v1alpha1.base import Part, Rule
from kvloop_operator.api.v1alpha1.faults import faults_of
from kvloop_operator.api.v1alpha1.spec import DisaggregatedInferenceSpec
from kvloop_operator.api.v1alpha1.status import DisaggregatedInferenceStatus
from kvloop_operator.errors import InvalidResource
from kvloop_operator.names import MAXIMUM_NAME_LENGTH

_NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"


class Metadata(BaseModel):
    """What kvloop reads of an object's metadata; the API server owns the rest."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True, strict=True)

    name: Annotated[str, Field(min_length=1)]
    namespace: str | None = None
    uid: str | None = None
    generation: int | None = None


class DisaggregatedInference(Part):
    """A prefill/decode-disaggregated vLLM deployment whose KV travels in both directions."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.matches('{_NAME_PATTERN}')",
            holds=lambda it: re.fullmatch(_NAME_PATTERN, it.metadata.name) is not None,
            field="metadata.name",
            fault="not a DNS label that starts with a letter",
            remedy="use lower-case letters, digits and dashes, and no dot",
        ),
        Rule(
            cel=f"size(self.metadata.name) <= {MAXIMUM_NAME_LENGTH}",
            holds=lambda it: len(it.metadata.name) <= MAXIMUM_NAME_LENGTH,
            field="metadata.name",
            fault="too long for the names of what is made from it",
            remedy=f"use {MAXIMUM_NAME_LENGTH} characters or fewer",
        ),
    )

    api_version: Literal["kvloop.io/v1alpha1"]
    kind: Literal["DisaggregatedInference"]
    metadata: Metadata
    spec: DisaggregatedInferenceSpec
    status: DisaggregatedInferenceStatus | None = None

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Self:
        """The resource in ``document``, plain JSON data; raises InvalidResource with every fault that was found."""
        text = json.dumps(_without_nulls(document))
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InvalidResource(faults_of(error, cls, document)) from error


def _without_nulls(value: Any) -> Any:
    """``value`` as the API server sees it: a null is an absent field."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value
