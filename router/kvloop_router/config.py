"""The router's configuration: one YAML file, refused as a whole where anything in it is unknown or wrong.

Field names are those of the custom resource, in camel case. Times are in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from kvloop_connector.lease_ranks import LONGEST_LEASE_SECONDS
from kvloop_connector.settings import HANDLE_TTL_MARGIN_SECONDS, MINIMUM_DECODER_TTL_SECONDS
from kvloop_router.errors import InvalidConfig
from kvloop_router.truth import FLOOR

_VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
_RETAINED_SHARE = 0.5

Port = Annotated[int, Field(ge=0, le=65535)]
"""0 lets the system choose, for tests."""


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=False, strict=True
    )


class ListenTLS(_Model):
    """The certificate that clients see, with all that it needs of its chain, and its key; both are read anew when they
    change."""

    certificate_file: str
    key_file: str


class EngineTLS(_Model):
    """How engines with an ``https`` address are trusted: by the authorities in ``ca_file``.

    server_name: the name that their certificates have; without it, the host in their address. Pods are addressed by
        numbers, which certificates seldom have.
    certificate_file, key_file: the router's own, where engines ask for one.
    """

    ca_file: str
    server_name: str | None = Field(default=None, min_length=1)
    certificate_file: str | None = None
    key_file: str | None = None

    @model_validator(mode="after")
    def _a_certificate_has_a_key(self) -> EngineTLS:
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError("certificateFile and keyFile go together")
        return self


class Listen(_Model):
    """Where the API is served. ``tls``: None: without."""

    host: str = "0.0.0.0"  # noqa: S104  a pod serves on all of its addresses
    port: Port = 8000
    tls: ListenTLS | None = None


class Admin(_Model):
    """Where the operator's API is served, and the file with its bearer token."""

    host: str = "0.0.0.0"  # noqa: S104
    port: Port = 8081
    token_file: str


class Model(_Model):
    """The model as engines load it, and the name that clients use."""

    id: str = Field(min_length=1)
    served_name: str = Field(min_length=1)


class KubernetesDiscovery(_Model):
    """The pods of one deployment. ``namespace``: where none is given, that of the environment's POD_NAMESPACE."""

    deployment: str = Field(min_length=1)
    namespace: str = Field(min_length=1)


class Discovery(_Model):
    """Where engines come from: a watched file with a JSON list, or the API server."""

    file: str | None = None
    kubernetes: KubernetesDiscovery | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Discovery:
        if (self.file is None) == (self.kubernetes is None):
            raise ValueError("set exactly one of file and kubernetes")
        return self


class KVTransfer(_Model):
    """The settings that the engines run with."""

    connector: Literal["NixlConnector", "KvloopConnector"] = "NixlConnector"
    bidirectional_kv_xfer: bool = True
    kv_recompute_threshold: int = Field(default=64, ge=0)
    decoder_kv_blocks_ttl_seconds: int = Field(default=480, ge=MINIMUM_DECODER_TTL_SECONDS)
    longest_lease_seconds: int = Field(default=LONGEST_LEASE_SECONDS, ge=1)
    """How long engines retain at most, with all renewals."""
    retained_share_limit: float | None = Field(default=None, ge=0, le=1)
    """The share of a decode engine's KV blocks that kept handles may hold, half of them if absent. An engine with
    KvloopConnector that is told a limit keeps to it too."""

    @property
    def retained_share(self) -> float:
        """The share that counts."""
        return _RETAINED_SHARE if self.retained_share_limit is None else self.retained_share_limit

    @property
    def capped_by_engine(self) -> bool:
        """Whether a turn that would pass the share leaves no handle."""
        return self.verified_by_engine and self.retained_share_limit is not None

    @property
    def verified_by_engine(self) -> bool:
        """Whether prefill itself proves what it reads, so that nothing has to be proven here, and nothing can: its
        handles are sealed, and one whose blocks were cut off is refused."""
        return self.connector == "KvloopConnector"


class Leases(_Model):
    """For how long handles are renewed, at engines that can.

    expected_gap_seconds: what a conversation of which nothing is known is expected to pause between two turns.
    patience: for how many times the expected pause a handle is renewed.
    """

    renew: bool = True
    expected_gap_seconds: float = Field(default=60.0, gt=0)
    patience: float = Field(default=4.0, ge=0)


class Engine(_Model):
    """What the engines' vLLM version can do. The version itself is not told: for a new one that can do the same, no
    router has to be started anew.

    prompt_token_ids: takes ``kv_transfer_params.prompt_token_ids`` on chat requests (0.32 and later).
    stream_handles: streamed answers carry the handle (0.33 and later, or the plug-in).
    multi_group_reuse: a failed read of a handle with several KV groups fails the request (0.31 and later).
    """

    prompt_token_ids: bool
    stream_handles: bool
    multi_group_reuse: bool


class Limits(_Model):
    """body_bytes: the largest request body that is read.

    concurrent_requests_per_tenant: how many requests of one API key may run at once in one worker, unless the key has
        a limit of its own; None: any number.
    turns_per_engine, waiting_turns_per_engine: of all workers together, for each decode engine that takes turns: how
        many run at once, and how many more wait until they are refused.
    """

    body_bytes: int = Field(default=33_554_432, ge=1)
    concurrent_requests_per_tenant: int | None = Field(default=None, ge=0)
    turns_per_engine: int = Field(default=1024, ge=1)
    waiting_turns_per_engine: int = Field(default=1024, ge=0)

    def of_one_of(self, workers: int) -> Limits:
        """What one of so many processes keeps to, so that together they keep to this. A tenant's requests come on few
        connections, which seldom spread evenly: its limit stays whole in each."""
        running, waiting = (-(-most // workers) for most in (self.turns_per_engine, self.waiting_turns_per_engine))
        return self.model_copy(update={"turns_per_engine": running, "waiting_turns_per_engine": waiting})


class Timeouts(_Model):
    """Seconds. prefill: for a whole prefill leg. decode: for a whole answer that is not streamed. decode_stall: for
    which a streamed answer may bring nothing, from its request on. drain: for running turns after SIGTERM.

    keep_alive: for how long a stream may be silent before a comment is sent; None: for ever.
    """

    keep_alive_seconds: float | None = Field(default=None, gt=0)
    connect_seconds: float = Field(default=5.0, gt=0)
    prefill_seconds: float = Field(default=600.0, gt=0)
    decode_seconds: float = Field(default=3600.0, gt=0)
    decode_stall_seconds: float = Field(default=300.0, gt=0)
    drain_seconds: float = Field(default=600.0, ge=0)


class HealthChecks(_Model):
    """How engines are watched: ``health.Rules`` says what comes of it.

    interval: between two checks of an engine. timeout: for its answer.
    """

    interval_seconds: float = Field(default=2.0, gt=0)
    timeout_seconds: float = Field(default=5.0, gt=0)
    failures: int = Field(default=2, ge=1)
    successes: int = Field(default=1, ge=1)
    leg_failures: int = Field(default=5, ge=1)
    suspect_seconds: float = Field(default=10.0, gt=0)


class HandleStore(_Model):
    """Where handles are kept: in the memory of this one process, or in a server that routers share.

    max_handles, max_bytes: of all handles together; bytes about.
    url: of a Valkey or Redis server; its password may stand in a file, which is read at each connection.
    ca_file: who vouches for a server with TLS; without it, whom the system trusts.
    name: of what the routers that share handles have in common: one resource.
    timeout_seconds: for one call.
    """

    kind: Literal["memory", "valkey"] = "memory"
    max_handles: int = Field(default=20_000, ge=1)
    max_bytes: int = Field(default=419_430_400, ge=1_048_576)
    url: str | None = Field(default=None, pattern=r"^(redis|rediss|valkey|valkeys)://[^\s/?#]+(/[0-9]*)?$")
    password_file: str | None = None
    ca_file: str | None = None
    name: str = "kvloop"
    timeout_seconds: float = Field(default=0.25, gt=0)

    @model_validator(mode="after")
    def _has_a_url_where_it_needs_one(self) -> HandleStore:
        if (self.kind == "valkey") != (self.url is not None):
            raise ValueError("url and kind valkey go together")
        # Raises ValueError where the port is none.
        _ = urlsplit(self.url or "").port
        return self


class Canary(_Model):
    """Whether each new pair of engines is tried out before its KV transfer is called verified."""

    enabled: bool = True


class PathChoice(_Model):
    """Who chooses between the paths of a turn.

    decode_delay_weight: what a second counts that running answers are held up, against one until a first token.
    """

    mode: Literal["Auto", "Cold", "Warm", "Local"] = "Auto"
    decode_delay_weight: float = Field(default=1.0, ge=0)


class TruthSampling(_Model):
    """every_nth_warm_turn: of each pair of engines, one in so many is computed anew and compared; 0 for none.

    least_tolerance_nats: how far apart the first token's log-probabilities may be, in the mean of a token, whatever the
        engines' own noise is.
    """

    every_nth_warm_turn: int = Field(default=1000, ge=0)
    least_tolerance_nats: float = Field(default=FLOOR, gt=0)


class TemplateProbe(_Model):
    """Whether an engine of each model is asked once how it renders a synthetic chat."""

    enabled: bool = True


class Tracing(_Model):
    """Where spans go. Its headers, such as a key, are taken from the environment: OTEL_EXPORTER_OTLP_HEADERS.

    endpoint: the URL to which an OTLP collector takes spans over HTTP.
    sample_ratio: of the turns whose client sends no trace of its own; what a client has sampled, or not, stays so.
    """

    endpoint: str = Field(pattern="^https?://.")
    sample_ratio: float = Field(default=1.0, ge=0, le=1)


class Config(_Model):
    """The whole file."""

    listen: Listen = Listen()
    admin: Admin
    workers: int = Field(default=1, ge=1, le=64)
    """Processes that serve, each on one core. One is this very process; more are its children."""
    model: Model
    discovery: Discovery
    digest_key_file: str
    handle_ttl_seconds: int = Field(default=450, ge=1)
    kv_transfer: KVTransfer = KVTransfer()
    leases: Leases = Leases()
    engine: Engine
    cache_salt: bool = True
    session_headers: tuple[str, ...] = Field(default=(), strict=False)
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    health_checks: HealthChecks = HealthChecks()
    handle_store: HandleStore = HandleStore()
    canary: Canary = Canary()
    truth_sampling: TruthSampling = TruthSampling()
    template_probe: TemplateProbe = TemplateProbe()
    tracing: Tracing | None = None
    path_choice: PathChoice = PathChoice()
    reuse: bool = True
    suspended: bool = False
    """No engines are wanted: the router is ready without them, and answers 503 with ``Retry-After``."""
    api_keys_file: str | None = None
    engine_tls: EngineTLS | None = None
    """None: engines are spoken to without."""

    @model_validator(mode="after")
    def _workers_share_handles(self) -> Config:
        if self.workers > 1 and self.handle_store.kind == "memory":
            raise ValueError(
                f"workers: {self.workers} processes cannot share handles in memory; "
                "set handleStore.kind to valkey and handleStore.url to a server, or use 1"
            )
        return self

    @model_validator(mode="after")
    def _handles_end_before_the_engine_frees_them(self) -> Config:
        latest = self.kv_transfer.decoder_kv_blocks_ttl_seconds - HANDLE_TTL_MARGIN_SECONDS
        if self.handle_ttl_seconds > latest:
            raise ValueError(
                f"handleTtlSeconds: {self.handle_ttl_seconds} is too near to decoderKvBlocksTtlSeconds; "
                f"use {latest} or less"
            )
        return self

    def for_worker(self, port: int) -> Config:
        """What each of the workers keeps to, who listen on this port."""
        update = {
            "listen": self.listen.model_copy(update={"port": port}),
            "limits": self.limits.of_one_of(self.workers),
        }
        return self.model_copy(update=update)


def parse(text: str, environment: Mapping[str, str]) -> Config:
    """The configuration in ``text``. Raises InvalidConfig.

    environment: for ``$(NAME)`` in the hosts, and for the namespace.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidConfig(f"not YAML: {error}") from error
    if not isinstance(document, dict):
        raise InvalidConfig("not a map of settings")
    for section in ("listen", "admin"):
        _expand_host(document.get(section), environment)
    _set_namespace(document.get("discovery"), environment)
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        raise InvalidConfig("\n".join(_line(fault) for fault in error.errors())) from error


def load(path: Path, environment: Mapping[str, str]) -> Config:
    """The configuration in the file at ``path``. Raises InvalidConfig, whose message starts with the path."""
    try:
        return parse(path.read_text(encoding="utf-8"), environment)
    except OSError as error:
        raise InvalidConfig(f"{path}: {error.strerror}") from error
    except InvalidConfig as error:
        raise InvalidConfig(f"{path}: {error}") from error


def _expand_host(section: Any, environment: Mapping[str, str]) -> None:
    if isinstance(section, dict) and isinstance(section.get("host"), str):
        section["host"] = _VARIABLE.sub(lambda match: environment.get(match[1], match[0]), section["host"])


def _set_namespace(discovery: Any, environment: Mapping[str, str]) -> None:
    pods = discovery.get("kubernetes") if isinstance(discovery, dict) else None
    if isinstance(pods, dict) and pods.get("namespace") is None and "POD_NAMESPACE" in environment:
        pods["namespace"] = environment["POD_NAMESPACE"]


def _line(fault: Any) -> str:
    path = ".".join(str(part) for part in fault["loc"])
    message = str(fault["msg"]).removeprefix("Value error, ")
    return f"{path}: {message}" if path else message
