"""The few plain requests to an API server that starting a cluster takes."""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

REQUEST_SECONDS = 30


class Api:
    """Talks to one API server with one bearer token."""

    def __init__(self, server: str, *, authority: str, token: str) -> None:
        self._address = urlsplit(server).netloc
        self._trust = ssl.create_default_context(cadata=authority)
        self._headers = {"Authorization": f"Bearer {token}"}

    @classmethod
    def from_kubeconfig(cls, path: Path) -> Api:
        """With the address and token of a kubeconfig that `write_kubeconfig` wrote."""
        document = json.loads(path.read_text())
        cluster = document["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        return cls(cluster["server"], authority=authority, token=document["users"][0]["user"]["token"])

    def is_ready(self) -> bool:
        """Whether the server says that all of it is ready."""
        return self.get("/readyz") is not None

    def get(self, path: str) -> Any:
        """The answer, parsed if it is JSON; None if there is none, or not a good one."""
        return self._request("GET", path, None, "application/json")

    def patch(self, path: str, body: object, *, kind: str) -> Any:
        """Patch an object; `kind` is `json-patch` or `merge-patch`. None if that failed."""
        return self._request("PATCH", path, json.dumps(body), f"application/{kind}+json")

    def _request(self, method: str, path: str, body: str | None, content_type: str) -> Any:
        connection = http.client.HTTPSConnection(self._address, context=self._trust, timeout=REQUEST_SECONDS)
        try:
            connection.request(method, path, body, {**self._headers, "Content-Type": content_type})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        if answer.status >= 300:
            return None
        return json.loads(content) if answer.headers.get_content_type() == "application/json" else content.decode()
