"""The whole resource."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from kvloop_connector.settings import (
    HANDLE_TTL_MARGIN_SECONDS,
    MINIMUM_DECODER_TTL_SECONDS,
    OWN_EXTRA_KEYS,
    Connector,
)
from kvloop_operator.api.v1alpha1.base import (
    Annotations,
    Labels,
    ObjectName,
    Part,
    Rule,
    Seconds,
    ShortText,
    WholeOrText,
    defaulted,
    keyed_list,
    unique,
)
from kvloop_operator.api.v1alpha1.engine import Engine
from kvloop_operator.api.v1alpha1.kubernetes import LocalReference
from kvloop_operator.api.v1alpha1.model import Model
from kvloop_operator.api.v1alpha1.patterns import TEMPLATE_VERSION
from kvloop_operator.api.v1alpha1.roles import RoleSpec
from kvloop_operator.api.v1alpha1.router import RouterSpec

_OWN_KEYS = sorted(OWN_EXTRA_KEYS)


class ConnectorChoice(StrEnum):
    """How KV handles are proven to fit, as a resource says it."""

    AUTO = "Auto"
    NIXL = Connector.NIXL.value
    KVLOOP = Connector.KVLOOP.value


class EnginePlugin(StrEnum):
    """Whether kvloop's plug-in is brought into the engines."""

    AUTO = "Auto"
    ENABLED = "Enabled"
    DISABLED = "Disabled"


class KVTransfer(Part):
    """How KV travels between the roles. Both roles always get the same values."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="!has(self.extraConfig) || !self.extraConfig.exists(key, key in ["
            + ", ".join(f"'{key}'" for key in _OWN_KEYS)
            + "])",
            holds=lambda it: not OWN_EXTRA_KEYS & it.extra_config.keys(),
            entries=lambda it: sorted(OWN_EXTRA_KEYS & it.extra_config.keys()),
            field="extraConfig",
            fault="kvloop sets this key itself",
            remedy="remove it; kvTransfer and network.efa have fields for what may be changed",
        ),
        Rule(
            # The default of the whole, {}, is judged before its own defaults are in it.
            cel="!has(self.connector) || self.connector != 'KvloopConnector'"
            " || !has(self.enginePlugin) || self.enginePlugin != 'Disabled'",
            holds=lambda it: (
                it.connector is not ConnectorChoice.KVLOOP or it.engine_plugin is not EnginePlugin.DISABLED
            ),
            field="enginePlugin",
            fault="KvloopConnector comes with it",
            remedy="remove it, or use NixlConnector",
        ),
        Rule(
            cel="!has(self.longestLeaseSeconds) || self.longestLeaseSeconds >= self.decoderKvBlocksTtlSeconds",
            holds=lambda it: (
                it.longest_lease_seconds is None or it.longest_lease_seconds >= it.decoder_kv_blocks_ttl_seconds
            ),
            field="longestLeaseSeconds",
            fault="shorter than decode retains blocks without any renewal",
            remedy="use kvTransfer.decoderKvBlocksTtlSeconds or more, or leave it out",
        ),
    )

    bidirectional_kv_xfer: bool = True
    """``bidirectional_kv_xfer``: decode keeps the KV of a finished turn, and the next turn's prefill pulls it back."""
    decoder_kv_blocks_ttl_seconds: Annotated[int, Field(ge=MINIMUM_DECODER_TTL_SECONDS, le=86400)] = 480
    """``decoder_kv_blocks_ttl``: seconds that decode retains the KV blocks of a finished turn. They fill its KV cache
    for as long."""
    kv_recompute_threshold: Annotated[int, Field(ge=0, le=16777216)] = 64
    """``kv_recompute_threshold``, in tokens. It is compared, by vLLM, with min(remote_num_tokens, prompt tokens) −
    tokens that prefill's own prefix cache holds, after kvloop's trimming: fewer than the threshold are computed
    locally, as many or more are pulled. Prefill always looks in its own cache first."""
    connector: ConnectorChoice = ConnectorChoice.AUTO
    """NixlConnector: vLLM's own; the router proves what may be reused. KvloopConnector: a subclass that proves it in
    the engine. Auto: KvloopConnector with vLLM 0.32.0 (where KV is read back, with one data-parallel rank and no
    argument that it sets itself), else NixlConnector; status.kvTransfer says which, and why."""
    engine_plugin: EnginePlugin = EnginePlugin.AUTO
    """Whether kvloop's plug-in is brought into the engines, without another image: it puts KV handles on streamed
    answers where vLLM leaves them out (before 0.33), and lets the router release and renew what decode retains. Auto:
    with KvloopConnector, which comes with it. Enabled: with NixlConnector too. Disabled: no code of kvloop's is in
    the engines."""
    longest_lease_seconds: Annotated[int, Field(ge=MINIMUM_DECODER_TTL_SECONDS, le=604800)] | None = None
    """How long, in seconds, decode retains the blocks of a turn at most, with all renewals. Default: an hour, or
    decoderKvBlocksTtlSeconds where that is longer. Needs kvloop's plug-in in the engines."""
    retained_share_limit: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share, above 0 and up to 1, of decode's KV memory that retained blocks may hold: past it the router releases what
    was idle for longest. Default: half. Where it is set, decode with KvloopConnector keeps to it too: a turn that would
    pass it leaves nothing to be reused."""
    extra_config: Annotated[Mapping[str, WholeOrText], Field(max_length=32)] = Field(default_factory=dict)
    """Further keys of ``kv_connector_extra_config``, for both roles. The texts "true" and "false" become booleans."""


class EFAMode(StrEnum):
    """Who provides EFA interfaces to pods."""

    AUTO = "Auto"
    DEVICE_PLUGIN = "DevicePlugin"
    DRA = "DRA"
    DISABLED = "Disabled"


class EFA(Part):
    """AWS Elastic Fabric Adapter."""

    mode: EFAMode = EFAMode.AUTO
    """Auto: the device plugin where instanceType has EFA, else Disabled; nothing is asked of the cluster. DevicePlugin:
    the extended resource vpc.amazonaws.com/efa. DRA: a resource claim of deviceClassName. Disabled: KV travels over
    TCP."""
    device_class_name: ObjectName = "efa.networking.k8s.aws"
    """DeviceClass that mode DRA claims interfaces of."""


class PlacementMode(StrEnum):
    AUTO = "Auto"
    REQUIRED = "Required"
    PREFERRED = "Preferred"
    DISABLED = "Disabled"


class Placement(Part):
    """Whether engines of both roles stay in one topology domain."""

    mode: PlacementMode = PlacementMode.AUTO
    """Auto: Required with EFA, which does not cross availability zones, else Preferred."""
    topology_key: ShortText = "topology.kubernetes.io/zone"
    """Node label of the domain."""


class NetworkPolicyMode(Part):
    """NetworkPolicies that let only the router and the other role's engines reach an engine."""

    enabled: bool = True


class Network(Part):
    """How engines reach one another."""

    efa: EFA = defaulted(EFA)
    placement: Placement = defaulted(Placement)
    policy: NetworkPolicyMode = defaulted(NetworkPolicyMode)


class Rollout(Part):
    """How changes reach running engines."""

    max_surge: Annotated[int, Field(ge=0, le=16)] = 0
    """Pairs of engines that may run beside the wanted number during a rollout, where there are spare accelerators."""
    drain_timeout_seconds: Annotated[int, Field(ge=1, le=82800)] = 600
    """How long running turns on an engine may take to finish before it is stopped."""
    honour_handles_seconds: Seconds = 30
    """How long an engine without running turns is kept so that its retained blocks can still be pulled."""
    engine_template_version: Annotated[str, Field(min_length=1, max_length=32, pattern=TEMPLATE_VERSION)] | None = None
    """The engine template to use. Set it to status.engineTemplate.offered to take what a newer operator offers; engines
    are restarted for it."""


class ServiceAccount(Part):
    """The engines' service account, for example with an IAM role for S3. No token is mounted."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.create || !has(self.annotations) || size(self.annotations) == 0",
            holds=lambda it: it.create or not it.annotations,
            field="annotations",
            fault="annotations are written only to a service account that kvloop creates",
            remedy="set create to true, or annotate your own",
        ),
    )
    name: ObjectName | None = None
    """Default: the namespace's default account, or, with create, a name of kvloop's own."""
    create: bool = False
    annotations: Annotations = Field(default_factory=dict)


class SecurityProfile(StrEnum):
    PRIVILEGED = "privileged"
    IPC_LOCK = "ipcLock"
    NONE = "none"


class RouterTLS(Part):
    """What clients of the router see."""

    secret_name: ObjectName
    """Secret of type kubernetes.io/tls: tls.crt, with what it needs of its chain, and tls.key. What changes in it is
    used within minutes, without a restart."""


class EngineTLS(Part):
    """What the router sees of engines. They do not ask for a certificate of the router's: the kubelet, whose probes go
    the same way, has none to show."""

    secret_name: ObjectName
    """Secret of type kubernetes.io/tls with tls.crt, tls.key and ca.crt, as cert-manager writes it. Engines of both
    roles show tls.crt; the router is given nothing but ca.crt, which says whom it trusts."""
    server_name: ObjectName | None = None
    """The name in tls.crt that the router asks for, since pods are addressed by numbers. Default:
    NAME-engines.NAMESPACE.svc, of the resource's own name and namespace. Nothing has to resolve it."""
    serve: bool = True
    """False: engines speak HTTP, and the router still trusts those that are not replaced yet. The way back: first this,
    and when all are replaced, without engines altogether."""


class TLS(Part):
    """Encrypted connections; 1.2 is the oldest version that is spoken. KV itself travels between engines as NIXL sends
    it."""

    router: RouterTLS | None = None
    """Default: the router speaks HTTP."""
    engines: EngineTLS | None = None
    """Default: engines speak HTTP."""


class Security(Part):
    """What engine containers may do."""

    profile: SecurityProfile | None = None
    """privileged; ipcLock: the capability IPC_LOCK, which works only for root; none. Default: ipcLock with EFA, which
    has to lock memory, else none. privileged is for nodes where registering accelerator memory needs more; it and
    ipcLock need a namespace whose pod-security level is privileged."""
    tls: TLS | None = None


class Monitoring(Part):
    """Scraping by the Prometheus operator."""

    pod_monitor: bool = False
    """Whether PodMonitors are made, where the API exists."""
    interval_seconds: Annotated[int, Field(ge=1, le=3600)] = 15
    namespace: ObjectName | None = None
    """Namespace of Prometheus: its pods are let through to the engines' and router's metrics."""
    labels: Labels = Field(default_factory=dict)
    """Labels of the PodMonitors, as Prometheus selects them."""


def _no_interfaces_where_disabled(role: str) -> Rule:
    return Rule(
        cel=f"self.network.efa.mode != 'Disabled' || !has(self.{role}.efaInterfaces) || self.{role}.efaInterfaces == 0",
        holds=lambda it: it.network.efa.mode is not EFAMode.DISABLED or not getattr(it, role).efa_interfaces,
        field=f"{role}.efaInterfaces",
        fault="network.efa.mode is Disabled",
        remedy="remove efaInterfaces, or set the mode to DevicePlugin or DRA",
    )


class DisaggregatedInferenceSpec(Part):
    """A prefill/decode-disaggregated vLLM deployment whose KV travels in both directions."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.prefill.tensorParallelSize % self.decode.tensorParallelSize == 0"
            " || self.decode.tensorParallelSize % self.prefill.tensorParallelSize == 0",
            holds=lambda it: (
                it.prefill.tensor_parallel_size % it.decode.tensor_parallel_size == 0
                or it.decode.tensor_parallel_size % it.prefill.tensor_parallel_size == 0
            ),
            field="decode.tensorParallelSize",
            fault="the tensor-parallel sizes of prefill and decode do not divide one another",
            remedy="make one a multiple of the other",
        ),
        Rule(
            cel="!has(self.model.kvHeads) || self.prefill.tensorParallelSize == self.decode.tensorParallelSize"
            " || (self.prefill.tensorParallelSize <= self.model.kvHeads"
            " && self.decode.tensorParallelSize <= self.model.kvHeads)",
            holds=lambda it: (
                it.model.kv_heads is None
                or it.prefill.tensor_parallel_size == it.decode.tensor_parallel_size
                or max(it.prefill.tensor_parallel_size, it.decode.tensor_parallel_size) <= it.model.kv_heads
            ),
            field="model.kvHeads",
            fault="unequal tensor-parallel sizes pass the number of KV heads",
            remedy="make the sizes equal, or neither larger than the number of KV heads",
        ),
        Rule(
            cel=f"!has(self.router.handleTtlSeconds) || self.router.handleTtlSeconds + {HANDLE_TTL_MARGIN_SECONDS}"
            " <= self.kvTransfer.decoderKvBlocksTtlSeconds",
            holds=lambda it: (
                it.router.handle_ttl_seconds is None
                or it.router.handle_ttl_seconds + HANDLE_TTL_MARGIN_SECONDS
                <= it.kv_transfer.decoder_kv_blocks_ttl_seconds
            ),
            field="router.handleTtlSeconds",
            fault="less than 30 s before decode lets the blocks go",
            remedy="lower it to kvTransfer.decoderKvBlocksTtlSeconds − 30 or less, or leave it out",
        ),
        _no_interfaces_where_disabled("prefill"),
        _no_interfaces_where_disabled("decode"),
    )

    model: Model
    engine: Engine
    kv_transfer: KVTransfer = defaulted(KVTransfer)
    network: Network = defaulted(Network)
    prefill: RoleSpec = defaulted(RoleSpec)
    """Engines that compute the KV of prompts."""
    decode: RoleSpec = defaulted(RoleSpec)
    """Engines that generate the answers and keep their KV."""
    router: RouterSpec = defaulted(RouterSpec)
    rollout: Rollout = defaulted(Rollout)
    service_account: ServiceAccount = defaulted(ServiceAccount)
    security: Security = defaulted(Security)
    monitoring: Monitoring = defaulted(Monitoring)
    image_pull_secrets: Annotated[tuple[LocalReference, ...], keyed_list("name", 16), unique("name")] = ()
    priority_class_name: ObjectName | None = None
    """Of the engine pods."""
    runtime_class_name: ObjectName | None = None
    """Of the engine pods."""
    paused: bool = False
    """Whether the operator leaves everything as it is."""
    suspend: bool = False
    """Whether both roles are scaled to zero; the router answers 503."""
