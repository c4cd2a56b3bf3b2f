"""The few requests that the operator makes, each with its typed errors, over the official client.

Objects are plain JSON data: what the API server gives is kept whole, so that a field that this operator does not know
is neither lost nor written.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import kopf
from kubernetes.aio import client, config

from kvloop_operator.cluster.errors import ApiError, ConnectionUnknown, Unavailable, error_of
from kvloop_operator.cluster.kinds import EVENT, POD, RESOURCE, Kind
from kvloop_operator.live import Object

CHILD_MANAGER: Final = "kvloop-operator"
"""Field manager of what is made for a resource."""
STATUS_MANAGER: Final = "kvloop-operator-status"
"""Field manager of a resource's status: with one manager for both, each apply would prune the other's fields."""

_PAGE: Final = 500
_REQUEST_SECONDS: Final = 30.0
_APPLY: Final = "application/apply-patch+yaml"
_JSON: Final = "application/json"
_JSON_PATCH: Final = "application/json-patch+json"
_MERGE_PATCH: Final = "application/merge-patch+json"


class Api:
    """An API server, with the operator's identity. Every method raises ApiError."""

    def __init__(self, api_client: client.ApiClient) -> None:
        self._client = api_client
        self.requests = 0
        self.writes = 0

    async def get(self, kind: Kind, namespace: str, name: str) -> Object:
        """One object."""
        return await self._object("GET", kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> tuple[list[Object], int]:
        """Every object of a kind, and the version of the list. They carry their kind, as objects by name do."""
        query = {"limit": str(_PAGE), "labelSelector": labels, "fieldSelector": fields}
        found: list[Object] = []
        while True:
            page = await self._request("GET", kind.path(namespace), query=query)
            # Entries of a list come without these two.
            found += [{"apiVersion": kind.api_version, "kind": kind.kind, **entry} for entry in page["items"]]
            token = page["metadata"].get("continue")
            if not token:
                return found, int(page["metadata"].get("resourceVersion") or 0)
            query = {**query, "continue": token}

    async def apply(self, kind: Kind, manifest: Mapping[str, Any]) -> Object:
        """Server-side apply of a child: makes it, or takes over the fields in ``manifest`` and drops those of earlier
        applies that are not in it any more."""
        meta = manifest["metadata"]
        query = {"fieldManager": CHILD_MANAGER, "force": "true", "fieldValidation": "Strict"}
        path = kind.path(meta["namespace"], meta["name"])
        return await self._object("PATCH", path, query=query, body=manifest, content=_APPLY)

    async def patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]) -> Object:
        """A JSON patch; Refused where one of its tests does not hold."""
        query = {"fieldManager": CHILD_MANAGER}
        return await self._object(
            "PATCH", kind.path(namespace, name), query=query, body=operations, content=_JSON_PATCH
        )

    async def apply_status(self, namespace: str, name: str, uid: str, status: Mapping[str, Any]) -> Object:
        """Server-side apply of a resource's whole status; Conflict where the name belongs to another resource now."""
        body = {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.kind,
            "metadata": {"name": name, "namespace": namespace, "uid": uid},
            "status": status,
        }
        query = {"fieldManager": STATUS_MANAGER, "force": "true"}
        path = RESOURCE.path(namespace, name) + "/status"
        return await self._object("PATCH", path, query=query, body=body, content=_APPLY)

    async def label_pod(self, pod: Object, label: str, value: str | None) -> Object:
        """Set or remove one label of a pod; Conflict unless the pod is just as it is given."""
        meta = pod["metadata"]
        guard = {"uid": meta["uid"], "resourceVersion": meta["resourceVersion"]}
        patch = {"metadata": {**guard, "labels": {label: value}}}
        target = POD.path(meta["namespace"], meta["name"])
        query = {"fieldManager": CHILD_MANAGER}
        return await self._object("PATCH", target, query=query, body=patch, content=_MERGE_PATCH)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Object | None:
        """Delete an object, gracefully; gives the object where it stays for a while. Conflict where the name belongs
        to another object now."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        answer = await self._object("DELETE", kind.path(namespace, name), body=body)
        return answer if answer.get("kind") == kind.kind else None

    async def create_event(self, event: Mapping[str, Any]) -> None:
        """Tell people of something that happened."""
        await self._request("POST", EVENT.path(event["metadata"]["namespace"]), body=event)

    async def has(self, api: str) -> bool:
        """Whether the cluster has an API, given as ``group/version/Kind``."""
        group_version, _, kind = api.rpartition("/")
        try:
            found = await self._request("GET", f"/apis/{group_version}")
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["kind"] == kind for resource in found["resources"])

    async def _object(self, method: str, path: str, **more: Any) -> Object:
        answer: Object = await self._request(method, path, **more)
        return answer

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Any = None,
        content: str = _JSON,
    ) -> Any:
        self.requests += 1
        self.writes += method != "GET"
        what = f"{method} {path}"
        try:
            serialized = await self._client.param_serialize(
                method,
                path,
                query_params=[(key, value) for key, value in (query or {}).items() if value],
                header_params={"Accept": _JSON, "Content-Type": content},
                body=body,
                auth_settings=["BearerToken"],
            )
            method, url, headers, sent, _ = serialized
            answer = await self._client.call_api(
                method, url, headers, sent, _request_timeout=aiohttp.ClientTimeout(total=_REQUEST_SECONDS)
            )
            content_bytes = await answer.read()  # type: ignore[no-untyped-call]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(what, message=f"{type(error).__name__}: {error}") from error
        return _parsed(what, answer.status, answer.headers.get("Retry-After"), content_bytes)


def _parsed(what: str, status: int, retry_after: str | None, content: bytes) -> Any:
    try:
        document = json.loads(content)
    except ValueError as error:
        message = content[:200].decode("utf-8", "replace")
        raise Unavailable(what, status=status, message=f"an answer that is not JSON: {message}") from error
    if status < 300:
        return document
    fields = document if isinstance(document, dict) else {}
    raise error_of(
        what,
        status=status,
        reason=str(fields.get("reason", "")),
        message=str(fields.get("message", "")),
        retry_after=float(retry_after) if retry_after is not None and retry_after.isdigit() else None,
    )


@dataclass(frozen=True, slots=True)
class Connection:
    """The API server, and what kopf has to know to reach it too."""

    api: Api
    _configuration: client.Configuration

    async def login(self) -> kopf.ConnectionInfo:
        """As kopf wants it; asked for anew whenever a token is refused."""
        configuration = self._configuration
        header = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        scheme, _, token = (header or "").rpartition(" ")
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme or None,
            token=token or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            proxy_url=configuration.proxy,
        )


@asynccontextmanager
async def connected(user_agent: str) -> AsyncIterator[Connection]:
    """The API server of the pod's service account, or, outside of a cluster, of ``$KUBECONFIG``.

    Raises ConnectionUnknown where there is neither.
    """
    configuration = client.Configuration()
    try:
        if "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except config.ConfigException as error:
        raise ConnectionUnknown(f"no cluster to connect to: {error}; set KUBECONFIG, or run in a pod") from error
    # Retries are the work queue's business: it knows what else there is to do.
    configuration.retries = None
    async with client.ApiClient(configuration) as api_client:
        api_client.user_agent = user_agent
        yield Connection(Api(api_client), configuration)
