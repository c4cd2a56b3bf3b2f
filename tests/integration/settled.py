"""What must be left of turns that have ended: nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tests.integration.hazards import witness
from tests.integration.router_process import RouterUnderTest, until
from tests.integration.scripted_engine import ScriptedEngine


async def settled(router: RouterUnderTest, engines: Sequence[ScriptedEngine], *, lost: int = 0, burnt: int = 0) -> None:
    """Wait until all that turns began has ended; fails where anything of them is left: a request at an engine, a task,
    a place in a count, a handle that nobody can use, pull or release.

    lost: how many handles' blocks stay retained all the same, since no answer told of them, or their engine has ended.
    burnt: how many went on a leg that failed and may have read them: decode may retain their blocks until their time is
        over, and so long they count.
    """
    serving = router.router
    assert serving is not None
    await until(lambda: not any(engine.running for engine in engines))
    await until(lambda: not serving.state.turns and not serving.background.working)
    await until(lambda: not any(engine.turns for engine in serving.engines))
    for engine in serving.engines:
        assert (engine.tokens, sum(engine.by_rank.values())) == (0, 0)
    await until(lambda: not len(serving.releases))
    await until(lambda: not any(engine.running for engine in engines))
    kept = {handle.params["remote_request_id"] for handle in await serving.store.empty()}
    assert len(serving.store) == burnt, "some handles are still taken"
    retained = witness().unused()
    assert kept <= retained, "a handle was kept that was used before"
    assert len(retained - kept) == lost
    router.clock.ahead += 10_000
    await serving.store.due(0.0)
    assert len(serving.store) == 0
