"""Loopback addresses: each server of a test gets one of its own, as a pod does, and so may have any port."""

from __future__ import annotations

import random
import socket


def free_loopback_address(*ports: int) -> str:
    """An address on which all of `ports` are free; other test runs on this machine choose theirs too."""
    chance = random.SystemRandom()
    while True:
        address = f"127.{chance.randint(64, 254)}.{chance.randint(0, 254)}.{chance.randint(2, 254)}"
        try:
            for port in ports:
                with socket.socket() as probe:
                    probe.bind((address, port))
        except OSError:
            continue
        return address
