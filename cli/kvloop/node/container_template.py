"""Container of a manifest -> ``ContainerTemplate``. Pure."""

from __future__ import annotations

from kvloop.node.errors import UnsupportedManifest
from kvloop.node.fields import Fields, Notices
from kvloop.node.model import (
    Check,
    ContainerTemplate,
    EnvFrom,
    EnvVar,
    Exec,
    FieldRef,
    Hook,
    HttpGet,
    KeyRef,
    Literal,
    Mount,
    Probe,
    Probes,
    Sleep,
    TcpSocket,
)

_LARGEST_PORT = 65535
_HOST_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage"})


def read_container(fields: Fields, notices: Notices, *, init: bool = False) -> ContainerTemplate:
    """One container. Raises ``UnsupportedManifest`` for what the node cannot honour."""
    name = fields.need("name", str)
    ports = _ports(fields)
    if init:
        fields.refuse(
            "init containers have no probes and no lifecycle here", "startupProbe", "readinessProbe", "livenessProbe",
            "lifecycle",
        )  # fmt: skip
        fields.refuse("sidecar init containers are not supported by the local node", "restartPolicy")
    pre_stop = _pre_stop(fields, ports)
    has_command, has_args = fields.has("command"), fields.has("args")
    command, args = fields.strings("command"), fields.strings("args")
    template = ContainerTemplate(
        name=name,
        image=fields.need("image", str),
        command=command if has_command and command else None,
        args=args if has_args else None,
        working_dir=fields.get("workingDir", str, ""),
        env=tuple(_env_var(item) for item in fields.subs("env")),
        env_from=tuple(_env_from(item) for item in fields.subs("envFrom")),
        ports=tuple(ports.items()),
        mounts=tuple(_mount(item) for item in fields.subs("volumeMounts")),
        probes=Probes(
            startup=_probe(fields.sub("startupProbe"), ports),
            readiness=_probe(fields.sub("readinessProbe"), ports),
            liveness=_probe(fields.sub("livenessProbe"), ports),
        ),
        pre_stop=pre_stop,
        at=fields.path,
    )
    _resources(fields, notices)
    if fields.ignore("securityContext"):
        notices.add("security contexts are not applied")
    fields.refuse("block devices are not supported by the local node", "volumeDevices")
    fields.refuse("a terminal is not supported by the local node", "stdin", "stdinOnce", "tty")
    fields.ignore("imagePullPolicy", "terminationMessagePath", "terminationMessagePolicy", "resizePolicy")
    fields.close()
    return template


def _ports(fields: Fields) -> dict[str, int]:
    ports: dict[str, int] = {}
    for item in fields.subs("ports"):
        number = item.need("containerPort", int)
        if item.get("protocol", str, "TCP") != "TCP":
            raise UnsupportedManifest(item.at("protocol"), "only TCP ports are supported by the local node")
        item.refuse("host ports are not supported by the local node", "hostPort", "hostIP")
        ports[item.get("name", str, "") or str(number)] = number
        item.close()
    return ports


def _port(fields: Fields, ports: dict[str, int]) -> int:
    value = fields.raw("port")
    at = fields.at("port")
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value in ports:
        number = ports[value]
    elif isinstance(value, str) and value.isdigit():
        number = int(value)
    else:
        raise UnsupportedManifest(
            at, f"{value!r} is neither a port number nor the name of one of the container's ports"
        )
    if not 1 <= number <= _LARGEST_PORT:
        raise UnsupportedManifest(at, f"{number} is not a port number")
    return number


def _check(fields: Fields, ports: dict[str, int]) -> Check | None:
    """The httpGet, tcpSocket or exec of a probe or hook; None where none of them is there."""
    if (http := fields.sub("httpGet")) is not None:
        check: Check = HttpGet(
            port=_port(http, ports),
            path=http.get("path", str, "/") or "/",
            host=http.get("host", str, ""),
            scheme=http.get("scheme", str, "HTTP").lower(),
            headers=tuple((item.need("name", str), item.get("value", str, "")) for item in http.subs("httpHeaders")),
        )
        http.close()
        return check
    if (tcp := fields.sub("tcpSocket")) is not None:
        check = TcpSocket(port=_port(tcp, ports), host=tcp.get("host", str, ""))
        tcp.close()
        return check
    if (command := fields.sub("exec")) is not None:
        check = Exec(command=command.strings("command"))
        command.close()
        if not check.command:
            raise UnsupportedManifest(command.at("command"), "is required")
        return check
    return None


def _probe(fields: Fields | None, ports: dict[str, int]) -> Probe | None:
    if fields is None:
        return None
    fields.refuse("gRPC probes are not supported by the local node", "grpc")
    check = _check(fields, ports)
    if check is None:
        raise UnsupportedManifest(fields.path, "needs httpGet, tcpSocket or exec")
    grace = fields.get("terminationGracePeriodSeconds", int, -1)
    # Zero is not a legal value for these; clients that write it mean the default.
    probe = Probe(
        check=check,
        initial_delay=fields.get("initialDelaySeconds", int, 0),
        period=fields.get("periodSeconds", int, 0) or 10,
        timeout=fields.get("timeoutSeconds", int, 0) or 1,
        success_threshold=fields.get("successThreshold", int, 0) or 1,
        failure_threshold=fields.get("failureThreshold", int, 0) or 3,
        grace=None if grace < 0 else grace,
    )
    fields.close()
    return probe


def _pre_stop(fields: Fields, ports: dict[str, int]) -> Hook | None:
    lifecycle = fields.sub("lifecycle")
    if lifecycle is None:
        return None
    lifecycle.refuse("postStart hooks are not supported by the local node", "postStart")
    lifecycle.refuse("another stop signal is not supported by the local node", "stopSignal")
    pre_stop = lifecycle.sub("preStop")
    lifecycle.close()
    if pre_stop is None:
        return None
    hook: Hook | None = _check(pre_stop, ports)
    if hook is None and (sleep := pre_stop.sub("sleep")) is not None:
        hook = Sleep(seconds=sleep.need("seconds", int))
        sleep.close()
    pre_stop.close()
    if hook is None:
        raise UnsupportedManifest(pre_stop.path, "needs exec, httpGet, tcpSocket or sleep")
    return hook


def _env_var(fields: Fields) -> EnvVar:
    name = fields.need("name", str)
    source: Literal | FieldRef | KeyRef = Literal(text=fields.get("value", str, ""))
    if (value_from := fields.sub("valueFrom")) is not None:
        value_from.refuse("resource fields are not supported by the local node", "resourceFieldRef")
        if (field_ref := value_from.sub("fieldRef")) is not None:
            source = read_field_ref(field_ref)
        elif (reference := value_from.sub("configMapKeyRef")) is not None:
            source = _key_ref("ConfigMap", reference)
        elif (reference := value_from.sub("secretKeyRef")) is not None:
            source = _key_ref("Secret", reference)
        else:
            raise UnsupportedManifest(value_from.path, "needs fieldRef, configMapKeyRef or secretKeyRef")
        value_from.close()
    fields.close()
    return EnvVar(name=name, source=source)


def read_field_ref(fields: Fields) -> FieldRef:
    """A downward-API reference; whether the field exists is known when the pod is planned."""
    fields.ignore("apiVersion")
    reference = FieldRef(field_path=fields.need("fieldPath", str), at=fields.at("fieldPath"))
    fields.close()
    return reference


def _key_ref(kind: str, fields: Fields) -> KeyRef:
    reference = KeyRef(
        kind=kind,
        name=fields.need("name", str),
        key=fields.need("key", str),
        optional=fields.get("optional", bool, False),
        at=fields.path,
    )
    fields.close()
    return reference


def _env_from(fields: Fields) -> EnvFrom:
    prefix = fields.get("prefix", str, "")
    for key, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
        if (reference := fields.sub(key)) is not None:
            fields.close()
            source = EnvFrom(
                kind=kind,
                name=reference.need("name", str),
                prefix=prefix,
                optional=reference.get("optional", bool, False),
                at=reference.path,
            )
            reference.close()
            return source
    raise UnsupportedManifest(fields.path, "needs configMapRef or secretRef")


def _mount(fields: Fields) -> Mount:
    mount = Mount(
        volume=fields.need("name", str),
        path=fields.need("mountPath", str).rstrip("/"),
        sub_path=fields.get("subPath", str, ""),
        at=fields.path,
    )
    if not mount.path.startswith("/"):
        raise UnsupportedManifest(fields.at("mountPath"), f"{mount.path!r} is not an absolute path below /")
    if ".." in mount.sub_path.split("/") or mount.sub_path.startswith("/"):
        raise UnsupportedManifest(fields.at("subPath"), "must be a relative path without ..")
    fields.refuse("mount propagation is not supported by the local node", "mountPropagation")
    fields.refuse("subPathExpr is not supported by the local node", "subPathExpr")
    # A process cannot be kept from writing to its own user's files.
    fields.ignore("readOnly", "recursiveReadOnly")
    fields.close()
    return mount


def _resources(fields: Fields, notices: Notices) -> None:
    resources = fields.sub("resources")
    if resources is None:
        return
    asked = {**resources.get("requests", dict, {}), **resources.get("limits", dict, {})}
    devices = sorted({str(name) for name in asked} - _HOST_RESOURCES)
    if devices or resources.ignore("claims"):
        notices.add(f"device requests are ignored ({', '.join(devices) or 'resource claims'}): no device is attached")
    if _HOST_RESOURCES & asked.keys():
        notices.add("requests and limits of CPU and memory are not enforced")
    resources.close()
