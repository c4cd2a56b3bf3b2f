"""A cluster as tests and people hold it: started here, or somebody else's by its kubeconfig."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.cluster import build, cgroups, debian, images, parts
from tests.cluster.audit import AuditLog
from tests.cluster.build import location
from tests.cluster.credentials import Authority, encoded, write_kubeconfig
from tests.cluster.errors import ClusterFailedError, ClusterUnavailableError
from tests.cluster.kubectl import Kubectl
from tests.cluster.paths import REPOSITORY
from tests.cluster.state import Size, State, new_state, read_ready
from tests.cluster.waiting import wait_until

_TOKEN_DURATION: Final = "24h"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running cluster."""

    kubeconfig: Path
    """The administrator's."""
    folder: Path
    """Where kubeconfig files of other identities go."""
    state: State | None = None
    """Of a cluster that was started here."""
    init_pid: int | None = None
    """Process 1 of the node that was started here, as this machine counts."""

    @property
    def kubectl(self) -> Kubectl:
        """kubectl as the administrator."""
        return Kubectl(self.kubeconfig)

    @property
    def audit(self) -> AuditLog:
        """Raises ClusterUnavailableError for a cluster of somebody else's: its log cannot be read."""
        return AuditLog(self._own_state("the audit log").audit_log)

    def service_account(self, namespace: str, name: str) -> Path:
        """A kubeconfig for a ServiceAccount that exists, with a token from the TokenRequest API."""
        admin = Kubectl(self.kubeconfig, namespace)
        token = admin("create", "token", name, f"--duration={_TOKEN_DURATION}").strip()
        return self._write_identity(f"{namespace}.{name}", {"token": token})

    def user(self, name: str, *groups: str) -> Path:
        """A kubeconfig for a user of that name and those groups: by certificate here, by impersonation elsewhere."""
        file = f"user-{secrets.token_hex(4)}"
        if self.state is None:
            (admin,) = self._view()["users"]
            return self._write_identity(file, admin["user"] | {"as": name, "as-groups": list(groups)})
        certificate, key = Authority(self.state.keys).issue(file, user=name, groups=groups)
        return self._write_identity(
            file, {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)}
        )

    @contextlib.contextmanager
    def namespace(self, *, labels: dict[str, str] | None = None) -> Iterator[Kubectl]:
        """A namespace of one's own, deleted afterwards (nobody waits for it); gives kubectl in it."""
        name = f"test-{secrets.token_hex(4)}"
        metadata = {"name": name, "labels": labels or {}}
        self.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        in_namespace = Kubectl(self.kubeconfig, name)
        in_namespace.wait("create", "serviceaccount/default")
        try:
            yield in_namespace
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")

    def define(self, definition: Path) -> None:
        """Apply the CustomResourceDefinition in a file, and wait until its kind is served."""
        self.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={definition}")

        def established() -> bool:
            # Not `kubectl wait`, which gives up on an object that has no conditions yet.
            status = self.kubectl.json("get", f"--filename={definition}").get("status", {})
            conditions = {each["type"]: each["status"] for each in status.get("conditions") or ()}
            return conditions.get("Established") == "True"

        wait_until(established, what=f"the kind of {definition.name} served")

    def load_images(self, archive: Path) -> None:
        """Load the images of an OCI archive into the node."""
        images.load(self._own_state("loading images"), archive)

    def tag_image(self, image: str, other: str) -> None:
        """Give an image on the node a further name."""
        images.tag(self._own_state("naming images"), image, other)

    def in_node_network(self, *command: str) -> list[str]:
        """`command`, run on this machine but in the node's network, where pods and Services have addresses."""
        if self.init_pid is None:
            raise ClusterUnavailableError("the pod network is reached only on a node that was started here")
        return [debian.find("nsenter") or "nsenter", f"--net=/proc/{self.init_pid}/ns/net", *command]

    def _own_state(self, what: str) -> State:
        if self.state is None:
            raise ClusterUnavailableError(f"{what} needs a cluster that was started here, not one given by kubeconfig")
        return self.state

    def _write_identity(self, name: str, user: dict[str, object]) -> Path:
        (entry,) = self._view()["clusters"]
        return write_kubeconfig(self.folder / name, cluster=entry["cluster"], user=user)

    def _view(self) -> Any:
        return self.kubectl.json("config", "view", "--raw")


def require(size: Size) -> None:
    """Raise ClusterUnavailableError where a cluster of this size cannot run."""
    if sys.platform != "linux":
        raise ClusterUnavailableError(f"a cluster is started only on Linux, not on {sys.platform}")
    if size == "node":
        if os.geteuid() != 0:
            raise ClusterUnavailableError("a node is started only by root")
        cgroups.require_version_1()
        debian.require(debian.NODE_TOOLS)
        build.require(parts.NODE_PARTS)
    else:
        debian.require(debian.CONTROL_PLANE_TOOLS)
        build.require(parts.CONTROL_PLANE_PARTS)


@contextlib.contextmanager
def running(size: Size) -> Iterator[Cluster]:
    """A cluster of one's own, that ends with this process at the latest. Raises ClusterUnavailableError."""
    require(size)
    state = new_state()
    supervisor = subprocess.Popen(
        supervisor_command(size, state),
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Ctrl-C is for the tests; the supervisor ends with them.
        start_new_session=True,
    )
    with supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        assert supervisor.stderr is not None
        if supervisor.stdout.readline() != "ready\n":
            raise ClusterFailedError(supervisor.stderr.read())
        try:
            yield own(state)
        finally:
            supervisor.stdin.close()
            message = supervisor.stderr.read()
    if supervisor.returncode:
        raise ClusterFailedError(message)


def own(state: State) -> Cluster:
    """The ready cluster whose files lie in that folder."""
    kubeconfig = state.kubeconfig("admin")
    return Cluster(kubeconfig=kubeconfig, folder=kubeconfig.parent, state=state, init_pid=read_ready(state).init_pid)


@contextlib.contextmanager
def given(kubeconfig: str) -> Iterator[Cluster]:
    """Somebody else's cluster: the current context of `kubeconfig`, as the variable KUBECONFIG may say it."""
    build.require([parts.KUBECTL])
    with tempfile.TemporaryDirectory() as folder:
        # A copy, so that kubectl writes nothing beside the original.
        copy = Path(folder) / "admin"
        kubectl = location(parts.KUBECTL) / "kubectl"
        view = ("config", "view", "--raw", "--minify", "--flatten", "--output=json")
        copy.write_text(parts.run(kubectl, *view, environment={"KUBECONFIG": kubeconfig}))
        yield Cluster(kubeconfig=copy, folder=Path(folder))


def supervisor_command(size: Size, state: State, *flags: str) -> list[str]:
    """Runs a cluster of that size with its files in that folder."""
    return [sys.executable, "-m", "tests.cluster.supervisor", size, str(state.root), *flags]
