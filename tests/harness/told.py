"""What the operator says of resources: every version of their status, in order, so that nothing passes unseen.

::

    with Told(kubectl) as told:
        kubectl.apply(...)
        demo = told.of("demo")
        demo.waits_for(Reason.LOADING_MODEL, "demo-prefill-0")
        demo.is_stalled_by(Reason.CRASHING, "demo-decode-0", "exit code 2", "kubectl logs")
    assert told.contradictions() == []
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Self

from kvloop_operator.status import ConditionType, Reason
from tests.charts.argo import health
from tests.charts.kstatus import kstatus
from tests.cluster import parts
from tests.cluster.build import location
from tests.cluster.kubectl import Kubectl
from tests.cluster.waiting import wait_until
from tests.harness.kube import Object

_UNDER_WAY: Final = "Unknown"
_HISTORY: Final = 40
_ARGO: Final = {"Current": "Healthy", "InProgress": "Progressing", "Failed": "Degraded"}


class Told:
    """Watches the resources of a namespace while it is open. ``shown``: the reasons that were waited for and came."""

    def __init__(self, kubectl: Kubectl) -> None:
        self.shown: set[Reason] = set()
        self._kubectl = kubectl
        self._versions: dict[str, list[Object]] = {}

    def __enter__(self) -> Self:
        command = [str(location(parts.KUBECTL) / "kubectl"), f"--kubeconfig={self._kubectl.kubeconfig}"]
        command += [f"--namespace={self._kubectl.namespace}", "get", "dinf", "--watch", "--output=json"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._listener = threading.Thread(target=self._listen, name="told")
        self._listener.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait()
        self._listener.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def of(self, name: str) -> Subject:
        """What is said of one resource."""
        return Subject(self, name)

    def versions(self, name: str) -> list[Object]:
        """The resource of that name as it was, oldest first; the last one also after its end."""
        assert self._process.poll() is None, "kubectl does not watch any more"
        return list(self._versions.get(name, ()))

    def contradictions(self) -> list[str]:
        """Whatever was said at any time that cannot be so, or that the tools of GitOps would take otherwise."""
        found = []
        for name, versions in sorted(self._versions.items()):
            before: Mapping[str, Object] = {}
            found += [f"{name}: {each}" for each in _returns(versions)]
            for version in versions:
                conditions = conditions_of(version)
                told = [*_contradictions(version, conditions), *_moved_clocks(before, conditions)]
                found += [f"{name}, version {version['metadata']['resourceVersion']}: {each}" for each in told]
                before = conditions
        return found

    def _listen(self) -> None:
        assert self._process.stdout is not None
        lines: list[str] = []
        for line in self._process.stdout:
            lines.append(line)
            # Only an object's own brace stands at the beginning of a line.
            if line == "}\n":
                version = json.loads("".join(lines))
                self._versions.setdefault(version["metadata"]["name"], []).append(version)
                lines.clear()


class Subject:
    """One resource, and what was said of it."""

    def __init__(self, told: Told, name: str) -> None:
        self.name = name
        self._told = told

    def is_stalled_by(self, reason: Reason, *words: str) -> Object:
        """Wait until waiting is said not to help; gives the condition. ``words`` are in its message."""

        def stalled(version: Object) -> Object | None:
            conditions = conditions_of(version)
            ready, stalled = (conditions.get(kind, {}) for kind in (ConditionType.READY, ConditionType.STALLED))
            same = (ready.get("reason"), ready.get("message")) == (stalled.get("reason"), stalled.get("message"))
            return stalled if same and _says(ready, "False", reason, words) else None

        return self._newest(stalled, reason, f"stalled by {reason}: {words}")

    def waits_for(self, reason: Reason, *words: str) -> Object:
        """Wait until it is said not to serve yet, and why; gives the condition."""

        def waiting(version: Object) -> Object | None:
            conditions = conditions_of(version)
            there = conditions.get(ConditionType.RECONCILING, {})
            waits = conditions.get(ConditionType.READY, {}).get("status") == _UNDER_WAY
            return there if waits and _says(there, "True", reason, words) else None

        return self._newest(waiting, reason, f"waiting because of {reason}: {words}")

    def says(self, kind: ConditionType, status: str, reason: Reason, *words: str) -> Object:
        """Wait until a condition is so now; gives it."""

        def said(version: Object) -> Object | None:
            found = conditions_of(version).get(kind, {})
            return found if _says(found, status, reason, words) else None

        return self._newest(said, reason, f"{kind}={status} because of {reason}: {words}")

    def has_said(self, kind: ConditionType, status: str, reason: Reason, *words: str, since: int = 0) -> Object:
        """Wait until a condition was so at any time after the first ``since`` versions; gives the first such one."""

        def said() -> Object | None:
            versions = self._told.versions(self.name)[since:]
            found = (conditions_of(version).get(kind, {}) for version in versions)
            return next((each for each in found if _says(each, status, reason, words)), None)

        return self._wait(said, reason, f"{kind}={status} because of {reason}: {words}")

    @property
    def count(self) -> int:
        """How many versions there were so far."""
        return len(self._told.versions(self.name))

    @property
    def now(self) -> Object:
        """The newest version."""
        return self._told.versions(self.name)[-1]

    def history(self) -> str:
        """What was said last, for somebody who has to find out why a test failed."""
        told = []
        for version in self._told.versions(self.name)[-_HISTORY:]:
            said = [
                f"  {kind}={each['status']} {each['reason']}: {each['message']}"
                for kind, each in conditions_of(version, current=False).items()
            ]
            told.append(f"generation {version['metadata']['generation']}\n" + "\n".join(said))
        return "\n".join(told)

    def _newest(self, found: Callable[[Object], Object | None], reason: Reason, what: str) -> Object:
        def newest() -> Object | None:
            versions = self._told.versions(self.name)
            return found(versions[-1]) if versions else None

        return self._wait(newest, reason, what)

    def _wait(self, found: Callable[[], Object | None], reason: Reason, what: str) -> Object:
        answer: Object | None = None

        def there() -> bool:
            nonlocal answer
            answer = found()
            return answer is not None

        try:
            wait_until(there, what=f"{self.name} {what}")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.history()}") from error
        self._told.shown.add(reason)
        assert answer is not None
        return answer


def conditions_of(resource: Object, *, current: bool = True) -> dict[str, Object]:
    """A resource's conditions by type; with ``current`` only those about the spec as it is."""
    generation = resource["metadata"]["generation"]
    found = resource.get("status", {}).get("conditions", ())
    return {each["type"]: each for each in found if not current or each["observedGeneration"] == generation}


def _says(condition: Object, status: str, reason: Reason, words: tuple[str, ...]) -> bool:
    if (condition.get("status"), condition.get("reason")) != (status, reason):
        return False
    return all(each in condition["message"] for each in words)


def _contradictions(resource: Object, conditions: Mapping[str, Object]) -> Iterator[str]:
    if not conditions:
        return
    ready, stalled = conditions[ConditionType.READY], conditions.get(ConditionType.STALLED)
    reconciling = conditions.get(ConditionType.RECONCILING)
    why = f"Ready={ready['status']} because of {ready['reason']}"
    if (ready["status"] == "False") != (stalled is not None):
        yield f"{why}, and Stalled is {stalled}"
    if stalled is not None and reconciling is not None:
        yield f"both stalled and reconciling: {stalled['message']}; {reconciling['message']}"
    if stalled is not None and (ready["reason"], ready["message"]) != (stalled["reason"], stalled["message"]):
        yield f"{why}, and stalled by another: {stalled['message']}"
    unable = ready["reason"] in (Reason.PAUSED, Reason.CANARY_DISABLED)
    if ready["status"] == "Unknown" and reconciling is None and not unable:
        yield f"{why}, and nothing is under way"
    if ready["status"] == "True" and ready["reason"] != Reason.SUSPENDED:
        needed = (ConditionType.PREFILL_READY, ConditionType.DECODE_READY, ConditionType.ROUTER_READY)
        for kind in (*needed, ConditionType.KV_TRANSFER_VERIFIED):
            if conditions[kind]["status"] != "True":
                yield f"{why}, and {kind} is {conditions[kind]['status']}: {conditions[kind]['message']}"
    judged = kstatus(resource)
    expected = {"False": "Failed", "Unknown": "InProgress"}.get(ready["status"], "Current")
    if judged != ("InProgress" if reconciling is not None else expected):
        yield f"{why}, which kstatus calls {judged}"
    argo = health(resource).status
    suspended = ConditionType.PAUSED in conditions or ready["reason"] == Reason.SUSPENDED
    if argo != _ARGO[judged] and not (suspended and argo == "Suspended"):
        yield f"{why}, which Argo CD calls {argo}"
    for name, condition in conditions.items():
        if not condition["message"]:
            yield f"{name} says nothing"


def _returns(versions: Sequence[Object]) -> Iterator[str]:
    """Messages of one stall that change and come back: nothing has changed but the order of things."""
    told: list[tuple[int, str]] = []
    for version in versions:
        stalled = conditions_of(version).get(ConditionType.STALLED)
        said = (version["metadata"]["generation"], stalled["message"]) if stalled is not None else None
        if said is None:
            told.clear()
        elif said not in told:
            told.append(said)
        elif said != told[-1]:
            yield f"stalled again by what it was stalled by before: {said[1]}"
            return


def _moved_clocks(before: Mapping[str, Object], after: Mapping[str, Object]) -> Iterator[str]:
    for kind in before.keys() & after.keys():
        old, new = before[kind], after[kind]
        if old["status"] == new["status"] and old["lastTransitionTime"] != new["lastTransitionTime"]:
            yield f"{kind} stays {new['status']}, and is said to have changed"
