"""What the API server cannot know about a resource: small named checks over the resource and its facts.

A check yields a fault for everything it finds; the operator turns faults into the condition ``Stalled``, and
``kvloop validate`` prints them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvloop_connector.settings import Role
from kvloop_operator import names
from kvloop_operator.api.v1alpha1 import Accelerator, DisaggregatedInference, EFAMode
from kvloop_operator.api.v1alpha1.faults import path_of, shown, value_at
from kvloop_operator.engine_versions import NEWEST_KNOWN, OLDEST
from kvloop_operator.errors import Fault
from kvloop_operator.facts import (
    EFA_RESOURCE,
    ENGINE_TEMPLATE_VERSIONS,
    GPU_RESOURCE,
    NEURON_RESOURCE,
    POD_MONITOR_API,
    RESOURCE_CLAIM_API,
    Facts,
    RoleFacts,
)
from kvloop_operator.manifests import connector, engine, router, tls
from kvloop_operator.manifests.common import Context, plain
from kvloop_operator.manifests.overlay import own_paths
from kvloop_operator.serving import has_own_store, trusted_engines
from kvloop_operator.transfer_checks import (
    connector_starts,
    handshake_is_checked,
    leases_are_there,
    plugin_works,
    version_field,
)

Check = Callable[[DisaggregatedInference, Facts], Iterator[Fault]]

_OWN_MOUNTS = ("/dev/shm", names.MODELS_DIRECTORY, names.CACHE_DIRECTORY)  # noqa: S108 (in the pod)
_CPU_BLOCK_STEP = 32


def check(resource: DisaggregatedInference, facts: Facts) -> list[Fault]:
    """Everything that is wrong with a valid resource, in the order of CHECKS; empty where it can be deployed."""
    return [fault for each in CHECKS for fault in each(resource, facts)]


@dataclass(frozen=True, slots=True)
class Note:
    """Something that a user should know and that is no fault."""

    field: str
    text: str

    def __str__(self) -> str:
        return f"{self.field}: {self.text}"


def notes(resource: DisaggregatedInference, facts: Facts) -> list[Note]:
    """What works less well than the user may expect."""
    can, field = facts.engine, version_field(resource)
    found: list[Note] = []
    if can is None:
        return found
    context = Context(resource, facts, "")
    if not connector.streams_carry_handles(context):
        text = f"streamed answers of vLLM {can.version} carry no KV handle without kvloop's engine plug-in"
        remedy = "; kvTransfer.enginePlugin: Enabled brings it" if can.kvloop_connector else ""
        found.append(Note(field, text + remedy))
    for role in Role:
        obstacle = connector.obstacle_to_leases(context, role) if connector.has_plugin(context) else None
        if obstacle is not None:
            found.append(Note(obstacle, f"what {role} engines retain can be neither released nor renewed with it"))
    if not can.multi_group_reuse:
        found.append(Note(field, f"no KV is reused on vLLM {can.version} by models with more than one KV group"))
    if not can.run_here:
        found.append(Note(field, f"vLLM {can.version} was never run in kvloop's own tests"))
    return found


def engine_version_is_known(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """A version from the tag that is far off is another product's version."""
    spec = resource.spec.engine
    if facts.engine is None:
        yield Fault("spec.engine.image", shown(spec.image), "no vLLM version in the tag", "set engine.version")
    elif facts.version_from_tag and facts.engine.version.major > NEWEST_KNOWN.major:
        fault = f"{facts.engine.version} is no vLLM version that is known"
        yield Fault(
            "spec.engine.image", shown(spec.image), fault, "set engine.version to the vLLM version in the image"
        )


def engine_is_new_enough(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Before OLDEST an expired read returns another request's KV."""
    if facts.engine is None or facts.engine.bidirectional:
        return
    field = version_field(resource)
    value = resource.spec.engine.version or resource.spec.engine.image
    fault = f"vLLM {facts.engine.version} reads KV back after its time to live and answers with another request's text"
    yield Fault(field, shown(value), fault, f"use an image with vLLM {OLDEST} or later")


def engine_template_is_known(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """A template that this operator cannot render."""
    if facts.template_version not in ENGINE_TEMPLATE_VERSIONS:
        yield Fault(
            "spec.rollout.engineTemplateVersion",
            shown(facts.template_version),
            "this operator does not have this engine template",
            f"use {' or '.join(ENGINE_TEMPLATE_VERSIONS)}",
        )


def instance_types_are_known(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """What a type has follows from a table; what the table lacks has to be said."""
    auto = resource.spec.network.efa.mode is EFAMode.AUTO
    for role, spec in _roles(resource):
        if spec.instance_type is None or facts.role(role).instance is not None:
            continue
        missing = []
        if spec.accelerator is None:
            missing.append(f"{role}.accelerator")
        if auto and spec.efa_interfaces is None and spec.accelerator is not Accelerator.CPU:
            missing.append(f"{role}.efaInterfaces")
        if missing:
            yield Fault(
                f"spec.{role}.instanceType",
                shown(spec.instance_type),
                "an instance type that kvloop does not know",
                f"correct it, or set {' and '.join(missing)}",
            )


def accelerators_fit(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """The accelerator is what the instance has, and both roles have the same: KV of one kind is not another's."""
    contradicted = False
    for role, spec in _roles(resource):
        instance = facts.role(role).instance
        if spec.accelerator in (None, Accelerator.CPU) or instance is None:
            continue
        if instance.accelerator is not spec.accelerator:
            contradicted = True
            fault = f"{spec.instance_type} has {instance.accelerator}"
            yield Fault(f"spec.{role}.accelerator", shown(spec.accelerator), fault, "remove it, or change instanceType")
    prefill, decode = facts.prefill.accelerator, facts.decode.accelerator
    if prefill is not decode and not contradicted and not _types_unknown(resource, facts):
        yield Fault(
            "spec.decode.accelerator",
            shown(decode.value),
            f"prefill has {prefill}, and engines on different accelerators cannot exchange KV",
            "use the same accelerator for both roles",
        )


def devices_fit(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Parallel sizes fill whole devices, and no more than the instance or the resources have."""
    for role, spec in _roles(resource):
        own = facts.role(role)
        if not own.device_resource:
            continue
        ranks = spec.tensor_parallel_size * spec.data_parallel_size
        cores = own.instance.cores if own.instance else 1
        field, value = f"spec.{role}.tensorParallelSize", shown(spec.tensor_parallel_size)
        if own.devices.denominator != 1:
            fault = f"{ranks} ranks do not fill whole devices of {cores} cores"
            yield Fault(field, value, fault, f"make tensorParallelSize × dataParallelSize a multiple of {cores}")
        elif own.instance is not None and own.devices > own.instance.devices:
            fault = f"{own.devices} devices a pod, and {spec.instance_type} has {own.instance.devices}"
            yield Fault(field, value, fault, "lower it, or use a larger instance type")
        elif own.devices * cores < ranks:
            fault = f"{ranks} ranks on {own.devices} of {own.device_resource}"
            yield Fault(field, value, fault, f"lower it, or ask for {-(-ranks // cores)} in {role}.resources")


def efa_fits(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Interfaces are whole, known in number, and no more than the instance has."""
    mode = resource.spec.network.efa.mode
    for role, spec in _roles(resource):
        own = facts.role(role)
        field = f"spec.{role}.efaInterfaces"
        value = shown(spec.efa_interfaces) if spec.efa_interfaces is not None else "(absent)"
        if own.efa is EFAMode.DISABLED or _devices_unfit(own):
            continue
        if own.efa_interfaces is None:
            fault = f"network.efa.mode is {mode}, and nothing says how many interfaces a pod gets"
            yield Fault(field, value, fault, f"set it, or {role}.instanceType")
        elif own.instance is None:
            continue
        elif own.efa_interfaces > own.instance.efa:
            fault = f"{own.efa_interfaces} interfaces, and {spec.instance_type} has {own.instance.efa}"
            yield Fault(field, value, fault, f"use {own.instance.efa} or fewer")
        elif own.efa_interfaces.denominator != 1:
            has = own.instance
            share = f"{own.devices} of {has.devices} devices have no whole share of {has.efa} interfaces"
            fault = f"on {spec.instance_type}, {share}"
            remedy = "use more devices a pod, set the number by hand, or set network.efa.mode to Disabled"
            yield Fault(field, value, fault, remedy)
        elif own.efa_interfaces == 0:
            fault = f"network.efa.mode is {mode}, and {spec.instance_type} has no EFA"
            yield Fault(
                f"spec.{role}.instanceType", shown(spec.instance_type), fault, "use a type that has, or mode Auto"
            )


def efa_is_on_both_roles(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """KV travels over EFA or not; engines with different NIXL backends never exchange a byte."""
    without = [role for role in Role if facts.role(role).efa is EFAMode.DISABLED]
    if len(without) == 1 and not _types_unknown(resource, facts):
        role = without[0]
        spec = dict(_roles(resource))[role]
        yield Fault(
            f"spec.{role}.instanceType",
            shown(spec.instance_type) if spec.instance_type is not None else "(absent)",
            "this role has no EFA and the other has, so that no KV would move",
            "give both roles EFA, or set network.efa.mode to Disabled",
        )


def dynamic_allocation_is_there(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """EFA through DRA needs the API."""
    if resource.spec.network.efa.mode is EFAMode.DRA and RESOURCE_CLAIM_API not in facts.apis:
        yield Fault(
            "spec.network.efa.mode",
            shown(EFAMode.DRA.value),
            f"the cluster has no {RESOURCE_CLAIM_API}",
            "use DevicePlugin, or Kubernetes 1.34 or later",
        )


def pod_monitors_are_there(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Asked for, they should not be missing in silence."""
    if resource.spec.monitoring.pod_monitor and POD_MONITOR_API not in facts.apis:
        yield Fault(
            "spec.monitoring.podMonitor",
            "true",
            f"the cluster has no {POD_MONITOR_API}",
            "install the Prometheus operator, or set it to false",
        )


def block_size_fits_a_cpu(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Other sizes end in vLLM's `No common block size`."""
    size = resource.spec.engine.block_size
    if size is None or size % _CPU_BLOCK_STEP == 0:
        return
    if Accelerator.CPU in (facts.prefill.accelerator, facts.decode.accelerator):
        fault, remedy = "vLLM on a CPU has no such block size", f"use a multiple of {_CPU_BLOCK_STEP}"
        yield Fault("spec.engine.blockSize", shown(size), fault, remedy)


def tensor_parallel_fits_kv_heads(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """The rule of the schema again, for numbers of KV heads that the resource does not say itself."""
    prefill, decode = resource.spec.prefill.tensor_parallel_size, resource.spec.decode.tensor_parallel_size
    if facts.kv_heads is None or prefill == decode or max(prefill, decode) <= facts.kv_heads:
        return
    role, size = (Role.PREFILL, prefill) if prefill > decode else (Role.DECODE, decode)
    yield Fault(
        f"spec.{role}.tensorParallelSize",
        shown(size),
        f"unequal tensor-parallel sizes, and the model has {facts.kv_heads} KV heads",
        f"make the sizes equal, or neither larger than {facts.kv_heads}",
    )


def device_resources_are_kvloops(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Devices have fields of their own; in ``resources`` they would contradict them."""
    for role, spec in _roles(resource):
        own = facts.role(role)
        # Without an instance type the user's own count is all there is.
        free = {own.device_resource} if own.instance is None else set()
        for part, values in (("limits", spec.resources.limits), ("requests", spec.resources.requests)):
            for name in (GPU_RESOURCE, NEURON_RESOURCE, EFA_RESOURCE):
                if name in values and name not in free:
                    remedy = f"remove it; it follows from {role}.instanceType, the parallel sizes and efaInterfaces"
                    field = f"spec.{role}.resources.{part}.{name}"
                    yield Fault(field, shown(values[name]), "kvloop sets this resource itself", remedy)


def volume_mounts_fit(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Every mount has a volume, and none covers kvloop's own."""
    context = Context(resource, facts, "")
    own = [mount["mountPath"] for mount in (*connector.mounts(context), *tls.engine_mounts(context))]
    own += _OWN_MOUNTS
    for role, spec in _roles(resource):
        volumes = {volume.name for volume in spec.volumes}
        for index, mount in enumerate(spec.volume_mounts):
            path = f"spec.{role}.volumeMounts[{index}]"
            if mount.name not in volumes:
                yield Fault(f"{path}.name", shown(mount.name), "no such volume", f"add it to {role}.volumes")
            if mount.mount_path.rstrip("/") in own:
                fault, remedy = "kvloop mounts a volume there itself", "choose another directory"
                yield Fault(f"{path}.mountPath", shown(mount.mount_path), fault, remedy)


def overlays_leave_kvloops_own(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """The pod-template overlay is for what kvloop has no opinion about."""
    context = Context(resource, facts, "")
    overlays = [
        *((role.value, spec.pod_template, engine.pod_template(context, role)) for role, spec in _roles(resource)),
        (names.ROUTER, resource.spec.router.pod_template, router.pod_template(context)),
    ]
    for field, overlay, template in overlays:
        if overlay is None:
            continue
        document = plain(overlay)
        for path in own_paths(template, document):
            remedy = "remove it; the resource has a field for what may be changed"
            where = path_of(("spec", field, "podTemplate", *path))
            yield Fault(where, value_at(document, path), "kvloop sets this itself", remedy)


def routers_can_share_handles(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Several routers, or workers of one, need a server for their handles, which is made in a cluster only."""
    if not has_own_store(resource.spec) or facts.discovery != "file":
        return
    router = resource.spec.router
    fault = "several routers need a server for their handles, and without a cluster none is made"
    if router.replicas > 1:
        yield Fault("spec.router.replicas", shown(router.replicas), fault, "set router.handleStore.url, or 1 replica")
    if router.workers > 1:
        fault = fault.replace("routers", "workers of a router")
        yield Fault("spec.router.workers", shown(router.workers), fault, "set router.handleStore.url, or 1 worker")


def engines_have_certificates(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Certificates come from a Secret that somebody else keeps in a cluster."""
    engines = trusted_engines(resource.spec)
    if engines is not None and facts.discovery == "file":
        field, fault = "spec.security.tls.engines.secretName", "without a cluster there is no such Secret"
        yield Fault(field, shown(engines.secret_name), fault, "remove security.tls.engines")


def everything_asked_for_is_there(resource: DisaggregatedInference, facts: Facts) -> Iterator[Fault]:
    """Fields of the API that this version does not act on: better refused than ignored."""
    asked: list[tuple[str, Any]] = [
        *((f"{role}.autoscaling", each.autoscaling) for role, each in _roles(resource)),
    ]
    for field, value in asked:
        if value is not None:
            text = shown(plain(value) if hasattr(value, "model_dump") else value)
            yield Fault(f"spec.{field}", text, "this version of kvloop cannot do this yet", "remove it")


CHECKS: tuple[Check, ...] = (
    engine_version_is_known,
    engine_is_new_enough,
    connector_starts,
    plugin_works,
    leases_are_there,
    handshake_is_checked,
    engine_template_is_known,
    instance_types_are_known,
    accelerators_fit,
    devices_fit,
    efa_fits,
    efa_is_on_both_roles,
    dynamic_allocation_is_there,
    pod_monitors_are_there,
    block_size_fits_a_cpu,
    tensor_parallel_fits_kv_heads,
    device_resources_are_kvloops,
    volume_mounts_fit,
    overlays_leave_kvloops_own,
    routers_can_share_handles,
    engines_have_certificates,
    everything_asked_for_is_there,
)


def _roles(resource: DisaggregatedInference) -> tuple[tuple[Role, Any], ...]:
    return (Role.PREFILL, resource.spec.prefill), (Role.DECODE, resource.spec.decode)


def _types_unknown(resource: DisaggregatedInference, facts: Facts) -> bool:
    return any(spec.instance_type and facts.role(role).instance is None for role, spec in _roles(resource))


def _devices_unfit(own: RoleFacts) -> bool:
    return own.devices.denominator != 1 or (own.instance is not None and own.devices > own.instance.devices)
