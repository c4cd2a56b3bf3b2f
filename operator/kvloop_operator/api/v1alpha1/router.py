"""The router's part of the resource."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from kvloop_operator.api.v1alpha1.base import Annotations, Part, defaulted
from kvloop_operator.api.v1alpha1.engine import PullPolicy
from kvloop_operator.api.v1alpha1.kubernetes import (
    Affinity,
    PodTemplateOverlay,
    Resources,
    SecretKeyRef,
    SpreadConstraints,
    Tolerations,
)
from kvloop_operator.api.v1alpha1.patterns import HEADER_NAME, IMAGE, STORE_URL
from kvloop_operator.api.v1alpha1.roles import DisruptionBudget

_HeaderName = Annotated[str, Field(min_length=1, max_length=128, pattern=HEADER_NAME)]

SESSION_HEADERS = ("X-Session-ID", "X-Claude-Code-Session-Id", "X-LiteLLM-Session-Id", "session_id")
"""Headers by which agent frameworks tell their sessions apart."""


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class RouterService(Part):
    """The Service that clients call."""

    type: ServiceType = ServiceType.CLUSTER_IP
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    annotations: Annotations = Field(default_factory=dict)


class Canary(Part):
    """A two-turn conversation over each new pair of engines: warms the handshake and shows that KV moves both ways."""

    enabled: bool = True


class TruthSampling(Part):
    """One warm turn in so many is computed anew beside, and its first token compared."""

    every_nth_warm_turn: Annotated[int, Field(ge=0, le=1000000)] = 1000
    """Of each pair of engines; 0 for none."""
    least_tolerance_nats: Annotated[float, Field(gt=0, le=2)] = 0.5
    """How far apart, in the mean of a token, the two answers' log-probabilities may be whatever the engines' own noise
    is."""


class Limits(Part):
    """What one request may be."""

    body_bytes: Annotated[int, Field(ge=1024, le=1073741824)] = 33554432
    """Largest request body, in bytes; larger ones get 413."""
    concurrent_requests_per_tenant: Annotated[int, Field(ge=1, le=1000000)] | None = None
    """How many requests of one API key each router runs at once, where the key has no limit of its own; more get 429.
    Default: any number."""


class Timeouts(Part):
    """How long the router waits for an engine."""

    connect_seconds: Annotated[int, Field(ge=1, le=300)] = 5
    prefill_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """For the whole prefill leg, queueing included."""
    keep_alive_seconds: Annotated[int, Field(ge=1, le=3600)] | None = None
    """After how long without a byte of a stream that has begun the router sends a comment, for load balancers that cut
    silent connections. Default: never."""


class HandleStore(Part):
    """Where KV handles are kept between turns. In the router's memory, unless url is set."""

    url: Annotated[str, Field(max_length=512, pattern=STORE_URL)] | None = None
    """Valkey or Redis shared by all replicas."""
    max_handles: Annotated[int, Field(ge=1, le=10000000)] = 20000
    """More than this are released, oldest first."""


class RouterSpec(Part):
    """The OpenAI-compatible router in front of the engines."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """More than one need a shared handle store."""
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE)] | None = None
    """Default: the router of the operator's own version."""
    image_pull_policy: PullPolicy | None = None
    handle_ttl_seconds: Annotated[int, Field(ge=1, le=86400)] | None = None
    """How long a KV handle is used after its turn. At least 30 s less than kvTransfer.decoderKvBlocksTtlSeconds, since
    the read has to be over before decode lets the blocks go. Default: exactly 30 s less."""
    reuse: bool = True
    """Whether handles are used. False releases each one unused: for comparison."""
    cache_salt: bool = True
    """Whether the engines' prefix caches are kept apart by tenant (``cache_salt`` from the API key)."""
    session_headers: Annotated[tuple[_HeaderName, ...], Field(max_length=32)] = SESSION_HEADERS
    """Request headers that name a conversation, beside X-Conversation-ID. They select a handle; whether it fits the
    prompt is proven token by token."""
    api_keys_secret_ref: SecretKeyRef | None = None
    """Secret with one API key a line, or YAML or JSON of names and keys. What changes in it is used within minutes,
    without a restart. Without it every caller is served, as one tenant."""
    canary: Canary = defaulted(Canary)
    truth_sampling: TruthSampling = defaulted(TruthSampling)
    limits: Limits = defaulted(Limits)
    timeouts: Timeouts = defaulted(Timeouts)
    handle_store: HandleStore = defaulted(HandleStore)
    service: RouterService = defaulted(RouterService)
    resources: Resources = defaulted(Resources)
    node_selector: Annotated[Mapping[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)] = Field(
        default_factory=dict
    )
    tolerations: Tolerations = ()
    affinity: Affinity | None = None
    topology_spread_constraints: SpreadConstraints = ()
    pod_template: PodTemplateOverlay | None = None
    disruption_budget: DisruptionBudget = defaulted(DisruptionBudget)
