"""Errors of the connector package.

ConnectorError
├── InvalidSettings    KV-transfer settings that no engine may be started with
├── InvalidHandle      ``kv_transfer_params`` that are not a usable KV handle
├── InvalidProof       a KV handle whose proof cannot be read
├── InvalidRequest     a request to release or renew that is not one
├── InvalidAnswer      an engine's answer about leases that is not one
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


class InvalidRequest(ConnectorError):
    """A request to release or renew leases that is not one. ``field`` is empty where the whole body is at fault."""

    def __init__(self, field: str, fault: str) -> None:
        super().__init__(f"{field or 'body'}: {fault}")
        self.field = field


class InvalidAnswer(ConnectorError):
    """What an engine, or one of its workers, says of leases cannot be used; the message says why."""


class UnsupportedEngine(ConnectorError):
    """The engine may not start with this connector; the message says what to do instead."""
