"""How much one tenant may ask of this router at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvloop_router.api_keys import Caller
from kvloop_router.errors import RequestError

_RETRY_AFTER_SECONDS = 1


class TenantLimits:
    """Counts each tenant's requests that run.

    most: how many may run at once, where a key has no limit of its own; None: any number.
    refused: called for each that may not.
    """

    def __init__(self, most: int | None, refused: Callable[[], None]) -> None:
        self._most = most
        self._refused = refused
        self._running: Counter[bytes] = Counter()

    def begins(self, caller: Caller) -> None:
        """A request runs, until ``ends``. Raises RequestError where its tenant has too many, who then has no more."""
        own = caller.concurrent_requests
        most = self._most if own is None else own
        if most is not None and self._running[caller.tenant] >= most:
            self._refused()
            raise RequestError(
                f"Rate limit reached: {most} requests of this key may run at once. Try again when one has ended.",
                code="rate_limit_exceeded",
                status=429,
                kind="rate_limit_error",
                retry_after=_RETRY_AFTER_SECONDS,
            )
        self._running[caller.tenant] += 1

    def ends(self, caller: Caller) -> None:
        """It does not any more."""
        self._running[caller.tenant] -= 1
        if not self._running[caller.tenant]:
            del self._running[caller.tenant]
