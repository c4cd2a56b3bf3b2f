"""Pod template of a manifest -> ``PodTemplate``. Pure."""

from __future__ import annotations

from kvloop.node.container_template import read_container, read_field_ref
from kvloop.node.errors import UnsupportedManifest
from kvloop.node.fields import Fields, Notices
from kvloop.node.model import ContainerTemplate, FieldFiles, Item, ObjectFiles, PodTemplate, Volume

_RESTART_POLICIES = ("Always", "OnFailure", "Never")
_DEFAULT_GRACE_SECONDS = 30
_DEFAULT_FILE_MODE = 0o644

_PLACEMENT = (
    "affinity", "nodeSelector", "tolerations", "topologySpreadConstraints", "priorityClassName", "priority",
    "preemptionPolicy", "schedulerName", "schedulingGates", "runtimeClassName",
)  # fmt: skip
_WITHOUT_EFFECT = (
    "automountServiceAccountToken", "imagePullSecrets", "enableServiceLinks", "dnsPolicy", "dnsConfig", "hostname",
    "subdomain", "setHostnameAsFQDN", "hostUsers", "os", "overhead", "serviceAccount",
)  # fmt: skip


def read_pod_template(value: object, path: str, notices: Notices) -> PodTemplate:
    """A ``template`` of a StatefulSet or Deployment. Raises ``UnsupportedManifest`` for what the node cannot honour."""
    fields = Fields(value, path)
    metadata = fields.sub("metadata")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    if metadata is not None:
        labels, annotations = metadata.string_map("labels"), metadata.string_map("annotations")
        metadata.ignore("name", "namespace", "creationTimestamp")
        metadata.close()
    spec = Fields(fields.need("spec", dict), fields.at("spec"))
    fields.close()
    init_containers = tuple(read_container(item, notices, init=True) for item in spec.subs("initContainers"))
    containers = tuple(read_container(item, notices) for item in spec.subs("containers"))
    if not containers:
        raise UnsupportedManifest(spec.at("containers"), "is required")
    template = PodTemplate(
        labels=labels,
        annotations=annotations,
        init_containers=init_containers,
        containers=containers,
        volumes=tuple(_volume(item, notices) for item in spec.subs("volumes")),
        restart_policy=spec.get("restartPolicy", str, "Always"),
        grace=spec.get("terminationGracePeriodSeconds", int, _DEFAULT_GRACE_SECONDS),
        service_account=spec.get("serviceAccountName", str, "default"),
    )
    if template.restart_policy not in _RESTART_POLICIES:
        raise UnsupportedManifest(spec.at("restartPolicy"), f"{template.restart_policy!r} is not a restart policy")
    _leave_out(spec, notices)
    _check_names(template, spec.path)
    return template


def _leave_out(spec: Fields, notices: Notices) -> None:
    if spec.ignore(*_PLACEMENT):
        notices.add("there is one node: affinity, tolerations, priority and the like mean nothing")
    if spec.ignore("securityContext"):
        notices.add("security contexts are not applied")
    if spec.ignore("resourceClaims"):
        notices.add("device requests are ignored (resource claims): no device is attached")
    spec.ignore(*_WITHOUT_EFFECT)
    spec.refuse("host namespaces are not supported by the local node", "hostNetwork", "hostPID", "hostIPC")
    spec.refuse("a shared process namespace is not supported by the local node", "shareProcessNamespace")
    spec.refuse("host aliases are not supported by the local node: names do not resolve", "hostAliases")
    spec.refuse("readiness gates are not supported by the local node", "readinessGates")
    spec.refuse("deadlines are not supported by the local node", "activeDeadlineSeconds")
    spec.refuse("ephemeral containers are not supported by the local node", "ephemeralContainers")
    spec.close()


def _check_names(template: PodTemplate, path: str) -> None:
    containers: tuple[ContainerTemplate, ...] = (*template.init_containers, *template.containers)
    names = [container.name for container in containers]
    volumes = [volume.name for volume in template.volumes]
    for kind, values in (("containers", names), ("volumes", volumes)):
        if repeated := {name for name in values if values.count(name) > 1}:
            raise UnsupportedManifest(f"{path}.{kind}", f"the name {min(repeated)!r} is used twice")
    for container in containers:
        for mount in container.mounts:
            if mount.volume not in volumes:
                raise UnsupportedManifest(mount.at, f"there is no volume {mount.volume!r}")


def _volume(fields: Fields, notices: Notices) -> Volume:
    name = fields.need("name", str)
    if not name or "/" in name or name in (".", ".."):
        raise UnsupportedManifest(fields.at("name"), f"{name!r} is not a volume name")
    sources: tuple[ObjectFiles | FieldFiles, ...]
    if (empty := fields.sub("emptyDir")) is not None:
        if empty.get("medium", str, "") == "Memory":
            notices.add("memory-backed volumes are directories on disk, and /dev/shm is the machine's")
        if empty.ignore("sizeLimit"):
            notices.add("size limits of volumes are not enforced")
        empty.close()
        sources = ()
    elif (config_map := fields.sub("configMap")) is not None:
        sources = (_object_files("ConfigMap", config_map, "name"),)
    elif (secret := fields.sub("secret")) is not None:
        sources = (_object_files("Secret", secret, "secretName"),)
    elif (downward := fields.sub("downwardAPI")) is not None:
        sources = (_field_files(downward),)
    elif (projected := fields.sub("projected")) is not None:
        mode = projected.get("defaultMode", int, _DEFAULT_FILE_MODE)
        sources = tuple(_projection(item, mode) for item in projected.subs("sources"))
        projected.close()
    else:
        raise UnsupportedManifest(
            fields.path, "only configMap, secret, emptyDir, downwardAPI and projected volumes exist on the local node"
        )
    fields.close()
    return Volume(name=name, sources=sources)


def _projection(fields: Fields, mode: int) -> ObjectFiles | FieldFiles:
    source: ObjectFiles | FieldFiles
    if (config_map := fields.sub("configMap")) is not None:
        source = _object_files("ConfigMap", config_map, "name", mode)
    elif (secret := fields.sub("secret")) is not None:
        source = _object_files("Secret", secret, "name", mode)
    elif (downward := fields.sub("downwardAPI")) is not None:
        source = _field_files(downward, mode)
    else:
        raise UnsupportedManifest(
            fields.path, "only configMap, secret and downwardAPI can be projected on the local node"
        )
    fields.close()
    return source


def _object_files(kind: str, fields: Fields, name_key: str, mode: int = _DEFAULT_FILE_MODE) -> ObjectFiles:
    items = []
    for item in fields.subs("items"):
        items.append(Item(key=item.need("key", str), path=_relative(item)))
        item.ignore("mode")
        item.close()
    files = ObjectFiles(
        kind=kind,
        name=fields.need(name_key, str),
        items=tuple(items),
        optional=fields.get("optional", bool, False),
        mode=fields.get("defaultMode", int, mode),
        at=fields.path,
    )
    fields.close()
    return files


def _field_files(fields: Fields, mode: int = _DEFAULT_FILE_MODE) -> FieldFiles:
    items = []
    for item in fields.subs("items"):
        item.refuse("resource fields are not supported by the local node", "resourceFieldRef")
        reference = Fields(item.need("fieldRef", dict), item.at("fieldRef"))
        items.append((_relative(item), read_field_ref(reference)))
        item.ignore("mode")
        item.close()
    files = FieldFiles(items=tuple(items), mode=fields.get("defaultMode", int, mode))
    fields.close()
    return files


def _relative(fields: Fields) -> str:
    path = fields.need("path", str)
    if not path or path.startswith("/") or ".." in path.split("/"):
        raise UnsupportedManifest(fields.at("path"), "must be a relative path without ..")
    return path
