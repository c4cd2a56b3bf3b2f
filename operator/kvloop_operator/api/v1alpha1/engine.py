"""What both roles' engines have in common."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvloop_operator.api.v1alpha1.arguments import OWN_ARGUMENTS, OWN_ENV
from kvloop_operator.api.v1alpha1.base import Arguments, Part, Quantity, Rule
from kvloop_operator.api.v1alpha1.kubernetes import EnvVars
from kvloop_operator.api.v1alpha1.patterns import IMAGE, KV_CACHE_DTYPE
from kvloop_operator.engine_versions import TAG_VERSION_PATTERN, VERSION_PATTERN, version_of_tag


class PullPolicy(StrEnum):
    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class DType(StrEnum):
    """vLLM's ``--dtype``."""

    AUTO = "auto"
    HALF = "half"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT = "float"
    FLOAT32 = "float32"


class Engine(Part):
    """One image and one set of model settings for both roles: engines that differ here cannot exchange KV."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"has(self.version) || self.image.matches('{TAG_VERSION_PATTERN}')",
            holds=lambda it: it.version is not None or version_of_tag(it.image) is not None,
            field="image",
            fault="the tag does not say which vLLM version this is",
            remedy="set engine.version",
        ),
        OWN_ARGUMENTS,
        OWN_ENV,
    )
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE)]
    """vLLM image with NIXL, for both roles. On EFA it has to carry libfabric and hwloc."""
    image_pull_policy: PullPolicy | None = None
    version: Annotated[str, Field(max_length=64, pattern=VERSION_PATTERN)] | None = None
    """vLLM's version in the image, as in ``0.33.0``. Needed where the image's tag does not start with it."""
    dtype: DType = DType.AUTO
    """``--dtype`` of both roles."""
    block_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """``--block-size`` of both roles: tokens a KV block. Default: vLLM's own; 32 on a CPU."""
    max_model_len: Annotated[int, Field(ge=1, le=16777216)] | None = None
    """``--max-model-len`` of both roles: tokens of prompt and answer together. Default: the model's own."""
    kv_cache_dtype: Annotated[str, Field(min_length=1, max_length=32, pattern=KV_CACHE_DTYPE)] | None = None
    """``--kv-cache-dtype`` of both roles."""
    args: Arguments = ()
    """Further arguments of ``vllm serve``, for both roles. What kvloop sets itself is refused."""
    env: EnvVars = ()
    """Further environment of both roles. What kvloop sets itself is refused."""
    shared_memory: Quantity | None = None
    """Size of the memory-backed /dev/shm; counts towards the container's memory. Default: 32Gi; 2Gi on a CPU."""
    startup_timeout_seconds: Annotated[int, Field(ge=60, le=86400)] = 3600
    """How long an engine may take from its start to the first answer of /health before it is started anew: download,
    loading of the weights and compilation together."""
