"""Loopback addresses for pods: one /24 of 127.0.0.0/8 a node, one address a pod."""

from __future__ import annotations

import errno
import os
import socket

from kvloop.node.errors import NodeUnavailable

LOCK_PORT = 47123
"""Held by a node on the first address of its network, so that no other node of this machine takes the same one. The
kernel lets go of it when the node's process ends, however it ends."""

_SECOND_OCTETS = range(16, 240)
_FIRST_POD, _LAST_POD = 2, 254


class PodNetwork:
    """A /24 that belongs to this node until ``close``."""

    def __init__(self, lock: socket.socket, prefix: str) -> None:
        self._lock = lock
        self.prefix = prefix
        self.host_address = f"{prefix}.1"
        self._taken: set[str] = set()
        self._last = _LAST_POD

    @classmethod
    def claim(cls) -> PodNetwork:
        """Take a free network. Raises ``NodeUnavailable`` where there is none, as on a machine that is not Linux."""
        first = os.getpid()
        for attempt in range(len(_SECOND_OCTETS) * 256):
            second, third = divmod((first + attempt) % (len(_SECOND_OCTETS) * 256), 256)
            prefix = f"127.{_SECOND_OCTETS[second]}.{third}"
            lock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                lock.bind((f"{prefix}.1", LOCK_PORT))
                lock.listen(1)
            except OSError as error:
                lock.close()
                if error.errno == errno.EADDRINUSE:
                    continue
                raise NodeUnavailable(f"cannot use {prefix}.0/24 of the loopback network: {error.strerror}") from error
            return cls(lock, prefix)
        raise NodeUnavailable("every loopback network of this machine is taken by another node")

    def take(self) -> str:
        """A free address; one that was given back is used again as late as possible."""
        count = _LAST_POD - _FIRST_POD + 1
        for step in range(1, count + 1):
            number = _FIRST_POD + (self._last - _FIRST_POD + step) % count
            address = f"{self.prefix}.{number}"
            if address not in self._taken:
                self._last = number
                self._taken.add(address)
                return address
        raise NodeUnavailable(f"all {count} pod addresses of {self.prefix}.0/24 are taken")

    def give_back(self, address: str) -> None:
        self._taken.discard(address)

    def close(self) -> None:
        self._lock.close()


def is_port_free(address: str, port: int) -> bool:
    """Whether a pod could listen there. Another process that listens on all addresses takes the port of every pod."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True
