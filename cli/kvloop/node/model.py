"""What the node knows about a pod: the template as read, and the plan with everything resolved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpGet:
    """An HTTP request to the pod; 200 to 399 is a success. An empty host is the pod's address."""

    port: int
    path: str = "/"
    host: str = ""
    scheme: str = "http"
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpSocket:
    """A TCP connection to the pod; opening it is a success. An empty host is the pod's address."""

    port: int
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exec:
    """A command run beside the container's process, with its environment; exit status 0 is a success."""

    command: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """A pause, in seconds (preStop only)."""

    seconds: float


Check = HttpGet | TcpSocket | Exec
Hook = HttpGet | TcpSocket | Exec | Sleep


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A check with its rhythm; defaults are Kubernetes'. All times in seconds.

    grace: overrides the pod's grace period when a failure of this probe ends the container.
    """

    check: Check
    initial_delay: float = 0
    period: float = 10
    timeout: float = 1
    success_threshold: int = 1
    failure_threshold: int = 3
    grace: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probes:
    """The probes of a container; None where there is none."""

    startup: Probe | None = None
    readiness: Probe | None = None
    liveness: Probe | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Literal:
    """A value written in the manifest; may hold ``$(NAME)`` references."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRef:
    """A field of the pod, such as ``status.podIP``."""

    field_path: str
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRef:
    """One key of a ConfigMap or Secret (``kind``)."""

    kind: str
    name: str
    key: str
    optional: bool
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFrom:
    """All keys of a ConfigMap or Secret, each with ``prefix`` before it."""

    kind: str
    name: str
    prefix: str
    optional: bool
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """A variable and where its value comes from."""

    name: str
    source: Literal | FieldRef | KeyRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A volume, or the part of it below ``sub_path``, at ``path``."""

    volume: str
    path: str
    sub_path: str = ""
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One key of an object, and the file it becomes."""

    key: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFiles:
    """The keys of a ConfigMap or Secret as files; all keys where ``items`` is empty."""

    kind: str
    name: str
    items: tuple[Item, ...] = ()
    optional: bool = False
    mode: int = 0o644
    at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFiles:
    """Fields of the pod as files: (path, field)."""

    items: tuple[tuple[str, FieldRef], ...]
    mode: int = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A directory of the pod, filled from ``sources``; an emptyDir has none."""

    name: str
    sources: tuple[ObjectFiles | FieldFiles, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTemplate:
    """A container as the manifest says it. ``command`` is None where the image's entrypoint runs."""

    name: str
    image: str
    command: tuple[str, ...] | None
    args: tuple[str, ...] | None
    working_dir: str
    env: tuple[EnvVar, ...]
    env_from: tuple[EnvFrom, ...]
    ports: tuple[tuple[str, int], ...]
    mounts: tuple[Mount, ...]
    probes: Probes
    pre_stop: Hook | None
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTemplate:
    """A pod template as the manifest says it. ``restart_policy`` is Always, OnFailure or Never."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    init_containers: tuple[ContainerTemplate, ...]
    containers: tuple[ContainerTemplate, ...]
    volumes: tuple[Volume, ...]
    restart_policy: str
    grace: float
    service_account: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PodIdentity:
    """What tells one pod from another made from the same template."""

    name: str
    namespace: str
    uid: str
    address: str
    host_address: str
    node_name: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlan:
    """A container with everything resolved: what is executed is ``argv`` with exactly ``environment``."""

    name: str
    image: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    working_dir: Path
    ports: tuple[tuple[str, int], ...]
    probes: Probes
    pre_stop: Hook | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file of a volume. ``path`` is absolute."""

    path: Path
    content: bytes
    mode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlan:
    """A pod that can be started: directories and files to make, init containers in order, then the containers."""

    identity: PodIdentity
    labels: Mapping[str, str]
    directory: Path
    directories: tuple[Path, ...]
    files: tuple[PlannedFile, ...]
    init_containers: tuple[ContainerPlan, ...]
    containers: tuple[ContainerPlan, ...]
    restart_policy: str
    grace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """ConfigMaps and Secrets by (kind, namespace, name), each with its keys as bytes."""

    data: Mapping[tuple[str, str, str], Mapping[str, bytes]] = field(default_factory=dict)

    def find(self, kind: str, namespace: str, name: str) -> Mapping[str, bytes] | None:
        return self.data.get((kind, namespace, name))
