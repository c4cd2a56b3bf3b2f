"""Errors of the connector package.

ConnectorError
├── InvalidSettings    KV-transfer settings that no engine may be started with
├── InvalidHandle      ``kv_transfer_params`` that are not a usable KV handle
├── InvalidProof       a KV handle whose proof cannot be read
└── UnsupportedEngine  an engine, or a way to run it, with which the connector was not tried
"""

from __future__ import annotations


class ConnectorError(ValueError):
    """Base of every error of this package."""


class InvalidSettings(ConnectorError):
    """KV-transfer settings that no engine may be started with.

    ``field`` is the name as the user wrote it, ``remedy`` says what to write instead.
    """

    def __init__(self, field: str, fault: str, remedy: str) -> None:
        super().__init__(f"{field}: {fault}; {remedy}")
        self.field = field
        self.fault = fault
        self.remedy = remedy


class InvalidHandle(ConnectorError):
    """``kv_transfer_params`` of an engine's answer that are not a usable KV handle.

    ``field`` is empty where the whole is at fault. The message names the field, never its value: a value may locate
    another tenant's blocks.
    """

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"{'.'.join(filter(None, ('kv_transfer_params', field)))}: {fault}")
        self.field = field


class InvalidProof(ConnectorError):
    """The proof in a KV handle cannot be read. ``field`` is empty where the whole is at fault; no value is shown."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"{'.'.join(filter(None, ('kv_transfer_params.kvloop', field)))}: {fault}")
        self.field = field


class UnsupportedEngine(ConnectorError):
    """The engine may not start with this connector; the message says what to do instead."""
