"""The router's part of the resource."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvloop_operator.api.v1alpha1.base import Annotations, Part, Rule, defaulted
from kvloop_operator.api.v1alpha1.engine import PullPolicy
from kvloop_operator.api.v1alpha1.kubernetes import (
    Affinity,
    PodTemplateOverlay,
    Resources,
    SecretKeyRef,
    SpreadConstraints,
    Tolerations,
)
from kvloop_operator.api.v1alpha1.patterns import HEADER_NAME, HTTP_URL, IMAGE, STORE_URL
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


class Tracing(Part):
    """OpenTelemetry spans of turns and their legs, for a collector."""

    endpoint: Annotated[str, Field(max_length=512, pattern=HTTP_URL)]
    """Where the collector takes OTLP over HTTP, as http://collector.monitoring:4318/v1/traces. Headers that it asks for
    come from the router's environment: OTEL_EXPORTER_OTLP_HEADERS, by podTemplate."""
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the turns whose clients bring no trace context. A client's own decision is kept."""


class PathMode(StrEnum):
    AUTO = "Auto"
    COLD = "Cold"
    WARM = "Warm"
    LOCAL = "Local"


class PathChoice(Part):
    """How a turn goes whose beginning a decode engine still holds: cold, warm or local."""

    mode: PathMode = PathMode.AUTO
    """Auto: warm, unless another path is expected to be clearly faster, by what the engines were seen to take. Else
    always this path, where it is possible."""
    decode_delay_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """What a second counts for which a local turn holds up running answers, against one until its first token."""


class Limits(Part):
    """What one request may be, and how many turns the router lets run and wait."""

    body_bytes: Annotated[int, Field(ge=1024, le=1073741824)] = 33554432
    """Largest request body, in bytes; larger ones get 413."""
    turns_per_engine: Annotated[int, Field(ge=1, le=1000000)] = 1024
    """Turns that each router pod lets run at once, for each decode engine that takes turns. More have to wait."""
    waiting_turns_per_engine: Annotated[int, Field(ge=0, le=1000000)] = 1024
    """Turns that wait in each router pod, for each decode engine; more get 429 with Retry-After."""
    concurrent_requests_per_tenant: Annotated[int, Field(ge=1, le=1000000)] | None = None
    """How many requests of one API key each worker of each router runs at once, where the key has no limit of its own;
    more get 429. Default: any number."""


class Timeouts(Part):
    """How long the router waits for an engine."""

    connect_seconds: Annotated[int, Field(ge=1, le=300)] = 5
    prefill_seconds: Annotated[int, Field(ge=1, le=86400)] = 600
    """For the whole prefill leg, queueing included."""
    decode_seconds: Annotated[int, Field(ge=1, le=86400)] = 3600
    """For a whole answer that is not streamed."""
    decode_stall_seconds: Annotated[int, Field(ge=1, le=86400)] = 300
    """For which a streamed answer may bring nothing, queueing for its first token included."""
    keep_alive_seconds: Annotated[int, Field(ge=1, le=3600)] | None = None
    """After how long without a byte of a stream that has begun the router sends a comment, for load balancers that cut
    silent connections. Default: never."""


class HealthChecks(Part):
    """How the router watches the engines, beside their own probes."""

    interval_seconds: Annotated[int, Field(ge=1, le=300)] = 2
    """Between two checks of an engine, with a random fifth more or less."""
    timeout_seconds: Annotated[int, Field(ge=1, le=300)] = 5
    failures: Annotated[int, Field(ge=1, le=100)] = 2
    """Checks that fail in a row until an engine gets no more turns."""
    successes: Annotated[int, Field(ge=1, le=100)] = 1
    """Checks that succeed in a row until it gets turns again."""
    leg_failures: Annotated[int, Field(ge=1, le=1000)] = 5
    """Requests that fail in a row (5xx, a reset, a time-out; never 4xx) until other engines are preferred."""
    suspect_seconds: Annotated[int, Field(ge=1, le=300)] = 10
    """For how long they are, the first time; twice as long each further time, up to five minutes."""


class HandleStore(Part):
    """Where KV handles are kept between turns. In the memory of a single router with one worker; several share a
    server: the one at url, or else a small Valkey that is made beside them."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.url) || !(has(self.passwordSecretRef) || has(self.caSecretRef))",
            holds=lambda it: it.url is not None or (it.password_secret_ref is None and it.ca_secret_ref is None),
            field="url",
            fault="it is not set, and a password or a certificate for it is",
            remedy="set it, or remove passwordSecretRef and caSecretRef",
        ),
        Rule(
            cel="!has(self.url) || !(has(self.image) || has(self.resources))",
            holds=lambda it: it.url is None or (it.image is None and it.resources is None),
            field="url",
            fault="image and resources are those of a server that is made where none is named",
            remedy="remove url, or image and resources",
        ),
    )
    url: Annotated[str, Field(max_length=512, pattern=STORE_URL)] | None = None
    """Valkey or Redis shared by all replicas and workers; valkeys:// and rediss:// with TLS."""
    password_secret_ref: SecretKeyRef | None = None
    """Its password; the user's name, if there is one, stands in the url."""
    ca_secret_ref: SecretKeyRef | None = None
    """Who vouches for a server with TLS. Default: whom the router's image trusts."""
    max_handles: Annotated[int, Field(ge=1, le=10000000)] = 20000
    """More than this are released, oldest first."""
    max_bytes: Annotated[int, Field(ge=1048576, le=1099511627776)] | None = None
    """The same for their size. A handle takes about 8 bytes a block of its conversation's tokens. Default: 400 MiB."""
    image: Annotated[str, Field(min_length=1, max_length=512, pattern=IMAGE)] | None = None
    """Valkey's, of the server that is made. Default: a version that kvloop was made for."""
    resources: Resources | None = None
    """Of the server that is made. Default: memory for twice maxBytes."""


class RouterSpec(Part):
    """The OpenAI-compatible router in front of the engines."""

    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """More than one share their handles in a server: handleStore."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes in each router pod, for as many cores. More than one share their handles as several replicas do, and
    the pod speaks for all of them."""
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
    tracing: Tracing | None = None
    path_choice: PathChoice = defaulted(PathChoice)
    limits: Limits = defaulted(Limits)
    timeouts: Timeouts = defaulted(Timeouts)
    health_checks: HealthChecks = defaulted(HealthChecks)
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
