"""What the pure functions get beside the resource, and how it follows from the resource and the operator's settings.

Nothing here judges: what cannot be known stays None, and ``check`` says what that means for the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from kvloop_connector.settings import Connector, Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import Accelerator, DisaggregatedInference, EFAMode, RoleSpec
from kvloop_operator.connector_choice import choose
from kvloop_operator.engine_versions import EngineCapabilities, capabilities, version_of, version_of_tag
from kvloop_operator.instance_types import InstanceType, instance_type

GPU_RESOURCE = "nvidia.com/gpu"
NEURON_RESOURCE = "aws.amazon.com/neuron"
EFA_RESOURCE = "vpc.amazonaws.com/efa"

POD_MONITOR_API = "monitoring.coreos.com/v1/PodMonitor"
RESOURCE_CLAIM_API = "resource.k8s.io/v1/ResourceClaimTemplate"
OPTIONAL_APIS = frozenset({POD_MONITOR_API, RESOURCE_CLAIM_API})
"""APIs that a cluster may or may not have."""

Discovery = Literal["kubernetes", "file"]

ENGINE_TEMPLATE_VERSIONS = ("1",)
"""Engine pod templates that this operator can render, oldest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecretMaterial:
    """What goes into the resource's Secret.

    admin_token: bearer token of the router's admin port.
    digest_key: key of the router's token digests, as hexadecimal text; the same for all replicas.
    seal_key: what engines with KvloopConnector seal their handles with; 16 to 64 characters.
    store_password: of the server in which routers share handles, where it is made beside them.
    """

    admin_token: str = field(repr=False)
    digest_key: str = field(repr=False)
    seal_key: str = field(repr=False)
    store_password: str = field(repr=False, default="")


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveConnector:
    """The image that a role's engines have kvloop's package from now, and the KV revision of these engines."""

    image: str
    kv_revision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSettings:
    """What the operator, or the local node, brings along for every resource.

    router_image: image of the router where the resource names none.
    bind_address: what servers in pods listen on; ``$(POD_IP)`` is expanded from the environment as Kubernetes does.
    discovery: where routers learn of engines: from the API server, or from ``engines_file`` where there is none.
    apis: which of OPTIONAL_APIS the cluster has.
    secret_material: None where the Secret exists already or is somebody else's business.
    operator_namespace: where the operator polls the routers' admin ports from; None lets every pod through to them.
    kv_heads: number of KV heads by model id, beside what the resource says.
    live_template_version: engine template that the resource's engines run now; None before there are any.
    live_connectors: what the resource's engines have kvloop's package from now, of the roles where they have it.
    """

    router_image: str = "kvloop/router:v0.1.0"
    bind_address: str = "0.0.0.0"  # noqa: S104 (a pod's own network)
    discovery: Discovery = "kubernetes"
    engines_file: str = names.ENGINES_FILE
    apis: frozenset[str] = OPTIONAL_APIS
    secret_material: SecretMaterial | None = None
    operator_namespace: str | None = None
    kv_heads: Mapping[str, int] = field(default_factory=dict)
    live_template_version: str | None = None
    live_connectors: Mapping[Role, LiveConnector] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFacts:
    """What one role's pods run on.

    accelerator: None where neither the resource nor the instance type says.
    instance: None where the resource names no type, or one that is not known.
    device_resource: extended resource of the accelerator; empty on a CPU.
    devices: how many of them a pod gets; a fraction where the tensor-parallel size does not fill whole ones.
    efa: who provides EFA interfaces; never Auto.
    efa_interfaces: how many a pod gets; a fraction where the pod's devices have no whole share of the instance's, None
        where nothing says how many there are.
    """

    accelerator: Accelerator
    instance: InstanceType | None
    device_resource: str
    devices: Fraction
    efa: EFAMode
    efa_interfaces: Fraction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that the pure functions know beside the resource. ``engine`` is None where no version is known.

    connector: the engines'; never a choice that is left to somebody.
    connector_because: where the choice was left to kvloop, and is vLLM's own: why; else empty.
    """

    engine: EngineCapabilities | None
    connector: Connector
    connector_because: str
    version_from_tag: bool
    prefill: RoleFacts
    decode: RoleFacts
    kv_heads: int | None
    apis: frozenset[str]
    router_image: str
    bind_address: str
    discovery: Discovery
    engines_file: str
    secret_name: str
    secret_material: SecretMaterial | None
    operator_namespace: str | None
    live_template_version: str | None
    template_version: str
    live_connectors: Mapping[Role, LiveConnector]

    def role(self, role: Role) -> RoleFacts:
        """The facts of one role."""
        return self.prefill if role is Role.PREFILL else self.decode

    @property
    def efa(self) -> bool:
        """Whether KV travels over EFA: both roles have interfaces. ``check`` refuses one without the other."""
        return EFAMode.DISABLED not in (self.prefill.efa, self.decode.efa)


def resolve(resource: DisaggregatedInference, settings: OperatorSettings) -> Facts:
    """The facts of ``resource``."""
    spec = resource.spec
    stated = version_of(spec.engine.version) if spec.engine.version is not None else None
    version = stated or version_of_tag(spec.engine.image)
    known_heads = settings.kv_heads.get(spec.model.id) if spec.model.id is not None else None
    wanted_template = spec.rollout.engine_template_version or settings.live_template_version
    template = wanted_template or ENGINE_TEMPLATE_VERSIONS[-1]
    engine = capabilities(version) if version is not None else None
    chosen = choose(spec, engine, template)
    return Facts(
        engine=engine,
        connector=chosen.connector,
        connector_because=chosen.because,
        version_from_tag=stated is None,
        prefill=_role_facts(spec.prefill, spec.network.efa.mode),
        decode=_role_facts(spec.decode, spec.network.efa.mode),
        kv_heads=spec.model.kv_heads if spec.model.kv_heads is not None else known_heads,
        apis=settings.apis,
        router_image=spec.router.image or settings.router_image,
        bind_address=settings.bind_address,
        discovery=settings.discovery,
        engines_file=settings.engines_file,
        secret_name=names.router_name(resource.metadata.name),
        secret_material=settings.secret_material,
        operator_namespace=settings.operator_namespace,
        live_template_version=settings.live_template_version,
        template_version=template,
        live_connectors=settings.live_connectors,
    )


def _role_facts(role: RoleSpec, mode: EFAMode) -> RoleFacts:
    instance = instance_type(role.instance_type) if role.instance_type is not None else None
    accelerator = role.accelerator or (instance.accelerator if instance else Accelerator.GPU)
    ranks = role.tensor_parallel_size * role.data_parallel_size
    devices = _devices(role, accelerator, instance, ranks)
    efa = _efa_mode(role, mode, instance)
    return RoleFacts(
        accelerator=accelerator,
        instance=instance,
        device_resource=_device_resource(accelerator),
        devices=devices,
        efa=efa,
        efa_interfaces=_efa_interfaces(role, efa, instance, devices),
    )


def _device_resource(accelerator: Accelerator) -> str:
    return {Accelerator.GPU: GPU_RESOURCE, Accelerator.NEURON: NEURON_RESOURCE, Accelerator.CPU: ""}[accelerator]


def _devices(role: RoleSpec, accelerator: Accelerator, instance: InstanceType | None, ranks: int) -> Fraction:
    resource = _device_resource(accelerator)
    if not resource:
        return Fraction(0)
    asked = role.resources.limits.get(resource, role.resources.requests.get(resource))
    if asked is not None and str(asked).isdigit():
        return Fraction(int(asked))
    return Fraction(ranks, instance.cores if instance else 1)


def _efa_mode(role: RoleSpec, mode: EFAMode, instance: InstanceType | None) -> EFAMode:
    """Follows from the resource alone, so that the same file gives the same manifests in every cluster."""
    if mode is not EFAMode.AUTO:
        return EFAMode.DISABLED if role.efa_interfaces == 0 else mode
    has_efa = role.efa_interfaces if role.efa_interfaces is not None else instance.efa if instance else 0
    return EFAMode.DEVICE_PLUGIN if has_efa else EFAMode.DISABLED


def _efa_interfaces(role: RoleSpec, efa: EFAMode, instance: InstanceType | None, devices: Fraction) -> Fraction | None:
    if efa is EFAMode.DISABLED:
        return Fraction(0)
    if role.efa_interfaces is not None:
        return Fraction(role.efa_interfaces)
    if instance is None:
        return None
    # A pod without accelerators of its own gets the whole instance.
    return instance.efa * devices / instance.devices if devices else Fraction(instance.efa)
