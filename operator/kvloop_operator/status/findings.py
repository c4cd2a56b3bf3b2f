"""Why a pod does not serve, in the words of a condition."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kvloop_operator import names
from kvloop_operator.live import Object, Refusal, count, entries, part, text
from kvloop_operator.observe import (
    BACK_OFF,
    CREATION_REASONS,
    IMAGE_REASONS,
    condition,
    ending,
    is_ready,
    is_terminating,
    seconds,
)
from kvloop_operator.status.reasons import REMEDIES, Reason

TERMINATION_SLACK_SECONDS = 60
"""How long after its grace period a pod may still be there."""

CRASH_SLACK_SECONDS = 10
"""How much longer than its last run a container has to run before it no longer counts as crashing."""

_LONGEST_DETAIL = 300
_BACK_OFF_PREFIX = "ErrImagePull: "

# What is told first where pods have different troubles.
_ORDER = (
    Reason.PODS_REFUSED,
    Reason.IMAGE_PULL_FAILED,
    Reason.CONTAINER_NOT_CREATED,
    Reason.OUT_OF_MEMORY,
    Reason.CRASHING,
    Reason.UNSCHEDULABLE,
    Reason.STUCK_TERMINATING,
    Reason.START_TIMED_OUT,
    Reason.POD_FAILED,
    Reason.UNHEALTHY,
    Reason.STARTING,
    Reason.LOADING_MODEL,
    Reason.ROUTER_NOT_READY,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a pod does not serve.

    grave: waiting does not help. until: when time alone changes the finding.
    first_try: perhaps only a first attempt has failed; it counts as grave where that was established before.
    remedy: what to do, where there is more to say than the reason says.
    """

    reason: Reason
    subject: str
    cause: str
    grave: bool = False
    until: float | None = None
    first_try: bool = False
    remedy: str = ""

    @property
    def message(self) -> str:
        remedy = self.remedy or REMEDIES.get(self.reason)
        told = f"{self.subject} {self.cause}"
        return f"{told}; {remedy}" if remedy else told


def worst(findings: Iterable[Finding]) -> Finding | None:
    """The one to tell; the same one whatever the order is, and whether a failure is being tried again or waited on."""

    def place(each: Finding) -> tuple[bool, int, str]:
        return not (each.grave or each.first_try), _ORDER.index(each.reason), each.subject

    return min(findings, key=place, default=None)


def finding(
    pod: Object, *, unschedulable_seconds: float, now: float, refusals: Iterable[Refusal] = ()
) -> Finding | None:
    """Why ``pod`` does not serve; None where it does, or is on its way out as it should be."""
    name = text(pod, "metadata", "name")
    if is_terminating(pod):
        return _terminating(pod, name, now)
    if is_ready(pod):
        return None
    if text(pod, "status", "phase") == "Failed":
        return Finding(Reason.POD_FAILED, name, f"has failed{_why(text(pod, 'status', 'reason'), pod)}")
    unplaced = _unplaced(pod, name, unschedulable_seconds=unschedulable_seconds, now=now)
    if unplaced is not None:
        return unplaced
    found = worst(_containers(pod, name, now))
    if found is None and entries(pod, "status", "containerStatuses"):
        return _not_ready_as_a_whole(pod, name)
    if found is None:
        placed = condition(pod, "PodScheduled").get("status") == "True"
        found = Finding(Reason.STARTING, name, "is being prepared on its node" if placed else "waits for a scheduler")
    if found.reason is Reason.STARTING:
        told = next((each for each in refusals if (each.kind, each.name) == ("Pod", name)), None)
        if told is not None:
            return replace(found, cause=f"cannot start yet: {_shortened(told.message)}")
    return found


def refused(refusals: Iterable[Refusal], *, kind: str, name: str) -> Finding | None:
    """Why the pods of a set are not made. ``name``: the set's, or for the sets of a Deployment how it begins."""
    for each in refusals:
        if each.kind == kind and (each.name == name or (kind == "ReplicaSet" and each.name.startswith(f"{name}-"))):
            return Finding(
                Reason.PODS_REFUSED, f"pods of {name}", f"are refused: {_shortened(each.message)}", grave=True
            )
    return None


def _terminating(pod: Object, name: str, now: float) -> Finding | None:
    # The timestamp is the end of the grace period, not its start.
    end = seconds(text(pod, "metadata", "deletionTimestamp"))
    if end is None or now < end + TERMINATION_SLACK_SECONDS:
        return None
    finalizers = part(pod, "metadata").get("finalizers")
    if finalizers:
        cause = f"does not end: held by {', '.join(map(str, finalizers))}"
        return Finding(
            Reason.STUCK_TERMINATING, name, cause, grave=True, remedy="see to what sets this finalizer, or remove it"
        )
    node = text(pod, "spec", "nodeName")
    where = f" on node {node}" if node else ""
    return Finding(Reason.STUCK_TERMINATING, name, f"does not end{where}", grave=True)


def terminating_until(pod: Object) -> float | None:
    """When a pod that ends counts as stuck."""
    end = seconds(text(pod, "metadata", "deletionTimestamp"))
    return None if end is None else end + TERMINATION_SLACK_SECONDS


def _unplaced(pod: Object, name: str, *, unschedulable_seconds: float, now: float) -> Finding | None:
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return None
    if scheduled.get("reason") == "SchedulingGated":
        return Finding(Reason.STARTING, name, "is held back by its scheduling gates")
    since = seconds(text(scheduled, "lastTransitionTime"))
    deadline = (since if since is not None else now) + unschedulable_seconds
    cause = f"finds no node: {_shortened(text(scheduled, 'message'))}"
    if now >= deadline:
        return Finding(Reason.UNSCHEDULABLE, name, cause, grave=True)
    return Finding(Reason.UNSCHEDULABLE, name, cause, until=deadline)


def _not_ready_as_a_whole(pod: Object, name: str) -> Finding:
    """Of a node that no longer reports, all is as it last said, but for the pod's readiness."""
    node = text(pod, "spec", "nodeName") or "its node"
    cause = f"is not ready, though its containers are: {node} may no longer report"
    return Finding(Reason.UNHEALTHY, name, cause, remedy=f"see `kubectl describe node {node}`")


def _containers(pod: Object, name: str, now: float) -> Iterator[Finding]:
    for status in entries(pod, "status", "initContainerStatuses"):
        found = _container(pod, name, status, now, init=True)
        if found is not None:
            yield found
    for status in entries(pod, "status", "containerStatuses"):
        found = _container(pod, name, status, now, init=False)
        if found is not None:
            yield found


def _container(pod: Object, name: str, status: Object, now: float, *, init: bool) -> Finding | None:
    if status.get("ready") is True or (init and status.get("started") is True):
        return None
    state = part(status, "state")
    waiting, ended, running = part(state, "waiting"), part(state, "terminated"), part(state, "running")
    subject = f"container {text(status, 'name')} of {name}"
    reason = text(waiting, "reason")
    if reason in IMAGE_REASONS:
        tried = f"image {text(status, 'image')}: {_pull_failure(text(waiting, 'message'))}"
        first = reason == "ErrImagePull"
        return Finding(Reason.IMAGE_PULL_FAILED, subject, f"has no image: {tried}", grave=not first, first_try=first)
    if reason in CREATION_REASONS:
        cause = f"cannot be created: {_shortened(text(waiting, 'message'))}"
        return Finding(Reason.CONTAINER_NOT_CREATED, subject, cause, grave=True)
    last = ended or part(status, "lastState", "terminated")
    if ended and init and ended.get("exitCode") == 0:
        return None
    if reason == BACK_OFF or ended:
        again = reason == BACK_OFF or count(status, "restartCount") > 0
        return _crash(name, text(status, "name"), last, grave=again)
    if running:
        return _running(pod, name, status, last, now, init=init)
    cause = f"is starting{_why(reason, waiting) if reason not in _USUAL else ''}"
    return Finding(Reason.STARTING, name, cause)


_USUAL = ("", "ContainerCreating", "PodInitializing")


def _running(pod: Object, name: str, status: Object, last: Object, now: float, *, init: bool) -> Finding:
    container = text(status, "name")
    if init:
        return Finding(Reason.STARTING, name, f"is starting: its container {container} runs first")
    started = seconds(text(status, "state", "running", "startedAt")) or 0.0
    ready_until = seconds(text(condition(pod, "Ready"), "lastTransitionTime")) or 0.0
    before = seconds(text(last, "startedAt"))
    until = _crash_window(last, started)
    was_ready_before = before is not None and ready_until > before
    if count(status, "restartCount") > 1 and until is not None and now < until and not was_ready_before:
        return replace(_crash(name, container, last, grave=True), until=until)
    if container == names.ROUTER_CONTAINER:
        # Its probe fails whenever the engines do.
        how = "no longer" if ready_until > started else "not"
        return Finding(Reason.ROUTER_NOT_READY, name, f"runs, and is {how} ready: it needs a ready pair of engines")
    if ready_until > started:
        return Finding(Reason.UNHEALTHY, f"container {container} of {name}", "runs, and fails its readiness probe")
    if container == names.ENGINE_CONTAINER:
        return Finding(Reason.LOADING_MODEL, name, "loads the model")
    return Finding(Reason.STARTING, name, f"waits for its container {container} to be ready")


def _crash_window(last: Object, started: float) -> float | None:
    """Until when a container that runs again may be on its way to its next crash."""
    begin, end = seconds(text(last, "startedAt")), seconds(text(last, "finishedAt"))
    return None if begin is None or end is None else started + (end - begin) + CRASH_SLACK_SECONDS


def _crash(name: str, container: str, last: Object, *, grave: bool) -> Finding:
    subject = f"container {container} of {name}"
    if text(last, "reason") == "OOMKilled":
        return Finding(
            Reason.OUT_OF_MEMORY, subject, "is killed since it needs more memory than its limit", grave=grave
        )
    cause = f"{'ends again and again' if grave else 'has ended'}: {ending(last)}"
    lines = text(last, "message").split("\n")
    told = next((line.strip() for line in reversed(lines) if line.strip()), "")
    remedy = f"read its last log with `kubectl logs {name} --container={container} --previous`"
    told = f"{cause}: {_shortened(told)}" if told else cause
    return Finding(Reason.CRASHING, subject, told, grave=grave, remedy=remedy)


def _pull_failure(message: str) -> str:
    """The registry's answer: the kubelet puts it behind other words while it waits for the next try."""
    _, found, answer = message.partition(_BACK_OFF_PREFIX)
    return _shortened(answer if found else message)


def _why(reason: str, holder: Object) -> str:
    message = text(holder, "message") or text(holder, "status", "message")
    told = ": ".join(words for words in (reason, _shortened(message)) if words)
    return f": {told}" if told else ""


def _shortened(message: str) -> str:
    line = " ".join(message.split()).rstrip(".;")
    return line if len(line) <= _LONGEST_DETAIL else f"{line[: _LONGEST_DETAIL - 1]}…"
