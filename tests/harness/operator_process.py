"""The operator as a process, with the rights that the chart gives it.

::

    kubeconfig = install_rights(cluster, helm)
    with OperatorProcess(kubeconfig, log=tmp_path / "operator.log", flags=["--resync-seconds=1"]) as operator:
        operator.wait_until_ready()
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from prometheus_client.parser import text_string_to_metric_families

from tests.charts.helm import CHART, Helm
from tests.cluster.cluster import Cluster
from tests.cluster.waiting import wait_until
from tests.harness.addresses import free_loopback_address

NAMESPACE: Final = "kvloop-system"
RELEASE: Final = "kvloop"
USER: Final = f"system:serviceaccount:{NAMESPACE}:{RELEASE}-operator"
"""Whom the audit log names."""
ROUTER_IMAGE: Final = "localhost/kvloop-router:test"

_PROBE_PORT: Final = 8080
_METRICS_PORT: Final = 9090
_STOP_SECONDS: Final = 60
_RIGHTS: Final = ("ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")


class OperatorEnded(AssertionError):
    """The process is not there any more; the message holds the end of its log."""


def install_rights(cluster: Cluster, helm: Helm, *, release: str = RELEASE, namespaces: Sequence[str] = ()) -> Path:
    """Make a release's ServiceAccount and roles as the chart has them; gives a kubeconfig of that account.

    release: its name has to have `kvloop` in it; the account is then called `RELEASE-operator`.
    namespaces: as the chart's `watchNamespaces`; they have to exist.
    """
    values = {"watchNamespaces": list(namespaces), "rbac": {"aggregate": release == RELEASE}}
    rendered = helm.render(CHART, values=values, release=release)
    cluster.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    cluster.kubectl.apply(*(manifest for manifest in rendered if manifest["kind"] in _RIGHTS))
    return cluster.service_account(NAMESPACE, f"{release}-operator")


class OperatorProcess:
    """One operator on an address of its own. As a context manager it is launched, and stopped in the end.

    module: what is run; another one than the operator's own changes something in it first.
    """

    def __init__(
        self,
        kubeconfig: Path,
        *,
        log: Path,
        flags: Sequence[str] = ("--all-namespaces",),
        module: str = "kvloop_operator",
    ) -> None:
        self.host = free_loopback_address(_PROBE_PORT, _METRICS_PORT)
        self.log = log
        self._kubeconfig = kubeconfig
        self._flags = list(flags)
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.launch()
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self.kill()
        if kind is not None:
            print(self.log_tail())

    @property
    def pid(self) -> int:
        """Process id of the operator itself, not of its supervisor. Raises OperatorEnded."""
        children = Path(f"/proc/{self._running().pid}/task/{self._running().pid}/children").read_text().split()
        if len(children) != 1:
            raise OperatorEnded(self.log_tail())
        return int(children[0])

    def launch(self) -> None:
        """Start it, without waiting."""
        assert self._process is None, "it runs already"
        command = [sys.executable, "-m", self._module, f"--router-image={ROUTER_IMAGE}", f"--host={self.host}"]
        command += [f"--probe-port={_PROBE_PORT}", f"--metrics-port={_METRICS_PORT}", *self._flags]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("supervise.py")), "0", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {"KUBECONFIG": str(self._kubeconfig), "POD_NAMESPACE": NAMESPACE},
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait until it has read the cluster. Raises OperatorEnded."""
        wait_until(lambda: self.get(_PROBE_PORT, "/readyz")[0] == 200, what="the operator ready")

    def health(self) -> tuple[int, str]:
        """Status and text of the liveness probe; status 0 where nothing answers."""
        return self.get(_PROBE_PORT, "/healthz")

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's series with these labels; 0 where there is none."""
        status, text = self.get(_METRICS_PORT, "/metrics")
        assert status == 200, self.log_tail()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(
            sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_for_resyncs(self, count: int) -> None:
        """Wait until everything was read anew and passed over `count` times from now on.

        One reading more is waited for, and then for an empty queue: the passes follow the reading.
        """
        name = "kvloop_operator_resyncs_total"
        wanted = self.metric(name, result="ok") + count + 1
        wait_until(lambda: self.metric(name, result="ok") >= wanted, what=f"{count} resyncs")

    def failures(self) -> float:
        """Passes over resources so far that have to be tried again."""
        name = "kvloop_operator_reconciles_total"
        return self.metric(name) - self.metric(name, result="ok")

    def resident_bytes(self) -> int:
        """Memory of the process, as /proc says."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) * 1024

    def log_tail(self, lines: int = 60) -> str:
        """The end of what it wrote."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"--- end of {self.log}\n" + "\n".join(text.splitlines()[-lines:])

    def stop(self) -> float:
        """Send SIGTERM and wait for the end; gives the seconds that it took."""
        process, started = self._running(), time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it does not end on SIGTERM\n{self.log_tail()}") from error
        finally:
            self.kill()
        return time.monotonic() - started

    def kill(self) -> None:
        """End it at once, as a node that fails does."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdin.close()

    def restart(self) -> None:
        """Kill it, start it anew and wait until it is ready."""
        self.kill()
        self.launch()
        self.wait_until_ready()

    def relaunch_if_ended(self) -> bool:
        """Start it anew where it has ended by itself, as the kubelet would; gives whether it had."""
        if self._process is None or self._process.poll() is None:
            return False
        self.kill()
        self.launch()
        return True

    def get(self, port: int, path: str) -> tuple[int, str]:
        """Status and text of an answer; status 0 where there is none. Raises OperatorEnded."""
        self._running()
        try:
            with urllib.request.urlopen(f"http://{self.host}:{port}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            raise OperatorEnded(f"the operator has ended\n{self.log_tail()}")
        return self._process
