"""Errors of the local node.

NodeError
├── UnsupportedManifest   the manifest asks for something that this node cannot do, or is not valid
├── NoSuchPod             the caller named a pod that does not exist
├── PodsNotReady          pods did not become Ready: one keeps failing, or the time is over
├── PortTaken             the local port that should lead to a pod cannot be used
└── NodeUnavailable       this machine cannot be a node (not Linux, no free loopback network)
"""

from __future__ import annotations


class NodeError(Exception):
    """Base of all errors that the local node raises on purpose."""


class UnsupportedManifest(NodeError):
    """A field that the node cannot honour. ``path`` is the field's path, ``reason`` a sentence without a full stop."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class NoSuchPod(NodeError):
    """No pod of this name exists on the node."""


class PodsNotReady(NodeError):
    """Pods that were waited for are not Ready. The message names each, its state, and its log file."""


class NodeUnavailable(NodeError):
    """This machine cannot run a local node."""


class PortTaken(NodeError):
    """A local port cannot be listened on."""
