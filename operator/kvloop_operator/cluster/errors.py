"""What can go wrong between the operator and the API server.

ConnectionUnknown
ApiError
├── Unavailable    no answer, or one that says to try again: 429, 5xx
├── Conflict       409: changed meanwhile, or a precondition does not hold
├── NotFound       404: the object, its namespace or its API
├── Forbidden      403: the operator's rights, or the namespace is on its way out
└── Refused        400, 413, 422: the object itself
"""

from __future__ import annotations

import re

from kvloop_operator.errors import OperatorError

# Of RBAC, of its guard against escalation, and of the admission plug-in OwnerReferencesPermissionEnforcement.
_LACKS_RIGHT = re.compile(
    r"cannot [a-z]+ resource|is attempting to grant RBAC permissions|cannot set blockOwnerDeletion"
)


class ConnectionUnknown(OperatorError):
    """Neither a service account nor a kubeconfig says where the API server is."""


class ApiError(OperatorError):
    """A request without success. ``status``: of HTTP, 0 where there was no answer. ``reason``: as Kubernetes names it.

    retry_after: seconds that the server asked to wait; None where it did not.
    """

    def __init__(
        self, what: str, *, status: int = 0, reason: str = "", message: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(f"{what}: {status or 'no answer'}: {message or reason}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after


class Unavailable(ApiError):
    """Another try may help."""


class Conflict(ApiError):
    """The object is not as the request takes it to be."""


class NotFound(ApiError):
    """There is no such object, namespace or API."""


class Forbidden(ApiError):
    """The operator may not do that, or nobody may."""

    @property
    def lacks_right(self) -> bool:
        """Whether the operator's roles are the cause: quotas and other admission answer with the same status."""
        return _LACKS_RIGHT.search(self.message) is not None

    @property
    def namespace_ends(self) -> bool:
        """Nothing can be made in a namespace that is being deleted."""
        return "because it is being terminated" in self.message


class Refused(ApiError):
    """The API server finds the object itself wrong; the same request fails again."""


def error_of(what: str, *, status: int, reason: str, message: str, retry_after: float | None) -> ApiError:
    """The error for an answer of that status."""
    kind = {409: Conflict, 404: NotFound, 403: Forbidden}.get(status)
    if kind is None:
        kind = Unavailable if status >= 500 or status in (401, 408, 410, 429) else Refused
    return kind(what, status=status, reason=reason, message=message, retry_after=retry_after)
