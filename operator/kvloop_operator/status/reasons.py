"""Every condition and every reason that it can have; ``docs/troubleshooting.md`` has a row for each reason."""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """The conditions, in the order in which they stand in the status."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    """Only while waiting helps."""
    STALLED = "Stalled"
    """Only while waiting does not help."""
    PAUSED = "Paused"
    """Only while ``spec.paused``."""
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    ROUTER_READY = "RouterReady"
    KV_TRANSFER_VERIFIED = "KVTransferVerified"
    DEGRADED = "Degraded"
    UPDATE_AVAILABLE = "UpdateAvailable"


class Reason(StrEnum):
    SERVING = "Serving"
    SUSPENDED = "Suspended"
    PAUSED = "Paused"

    INVALID_SPEC = "InvalidSpec"
    FORBIDDEN = "Forbidden"
    NAME_TAKEN = "NameTaken"
    APPLY_FAILED = "ApplyFailed"

    PODS_REFUSED = "PodsRefused"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_NOT_CREATED = "ContainerNotCreated"
    OUT_OF_MEMORY = "OutOfMemory"
    CRASHING = "Crashing"
    POD_FAILED = "PodFailed"
    STUCK_TERMINATING = "StuckTerminating"
    START_TIMED_OUT = "StartTimedOut"
    UNHEALTHY = "Unhealthy"
    STARTING = "Starting"
    LOADING_MODEL = "LoadingModel"

    ROLLING_OUT = "RollingOut"
    ROLLOUT_BLOCKED = "RolloutBlocked"
    DRAINING = "Draining"
    SCALING_UP = "ScalingUp"
    SCALING_DOWN = "ScalingDown"

    ROUTER_NOT_READY = "RouterNotReady"
    ROUTER_UNREACHABLE = "RouterUnreachable"
    VERIFYING_KV_TRANSFER = "VerifyingKVTransfer"
    VERIFIED = "Verified"
    TRANSFER_FAILED = "TransferFailed"
    WRONG_REUSE = "WrongReuse"
    SLOW_TRANSPORT = "SlowTransport"
    CANARY_DISABLED = "CanaryDisabled"

    ALL_READY = "AllReady"
    PARTLY_READY = "PartlyReady"
    PAIR_FAILED = "PairFailed"
    AS_EXPECTED = "AsExpected"
    UP_TO_DATE = "UpToDate"
    NEW_ENGINE_TEMPLATE = "NewEngineTemplate"


REMEDIES = {
    Reason.PODS_REFUSED: "raise the quota, or let the namespace's pod-security level admit the pod",
    Reason.UNSCHEDULABLE: "add nodes that have what it asks for, or ask for less",
    Reason.IMAGE_PULL_FAILED: "correct the image, or name a pull secret in spec.imagePullSecrets",
    Reason.CONTAINER_NOT_CREATED: "create what the message names, or correct the reference in the spec",
    Reason.OUT_OF_MEMORY: "raise its memory limit in resources, or let the engine use less",
    Reason.POD_FAILED: "it is made anew; if it fails again, see what its node lacks",
    Reason.STUCK_TERMINATING: "see whether its node is gone; then delete the node, or the pod with --force",
    Reason.START_TIMED_OUT: "see its events and log, or raise engine.startupTimeoutSeconds",
    Reason.UNHEALTHY: "see its log; it is restarted if that goes on",
    Reason.ROUTER_NOT_READY: "see its log where there is one",
}
"""What to do about a pod that does not serve, for the end of a message."""
