"""What the operator knows of the cluster: the newest version counts, whichever way it came."""

from __future__ import annotations

from typing import Any

from hypothesis import given, strategies as st

from kvloop_operator import names
from kvloop_operator.cluster.kinds import BY_NAME
from kvloop_operator.cluster.lag import GRACE_SECONDS, WatchLag
from kvloop_operator.cluster.store import Key, Store

_KEY = Key("here", "demo")


def _object(kind: str, name: str, version: int, *, uid: str = "1", owner: str | None = "resource") -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "namespace": "here",
        "name": name,
        "uid": uid,
        "resourceVersion": str(version),
        "labels": {names.LABEL_DEPLOYMENT: "demo"},
    }
    if owner is not None:
        metadata["ownerReferences"] = [{"uid": owner, "controller": True}]
    return {"kind": kind, "metadata": metadata}


def _version(store: Store, kind: str = "Service", name: str = "a") -> int | None:
    found = store.get(BY_NAME[kind], "here", name)
    return int(found["metadata"]["resourceVersion"]) if found is not None else None


def test_an_older_event_does_not_undo_an_own_write() -> None:
    store = Store()
    store.put(_object("Service", "a", 5))
    assert store.put(_object("Service", "a", 3)) == _KEY
    assert _version(store) == 5


def test_a_late_event_does_not_bring_back_what_was_deleted() -> None:
    store = Store()
    store.put(_object("Service", "a", 5))
    assert store.remove(_object("Service", "a", 7)) == _KEY
    store.put(_object("Service", "a", 6))
    assert _version(store) is None
    store.put(_object("Service", "a", 8, uid="2"))
    assert _version(store) == 8


def test_the_end_of_an_object_does_not_remove_its_successor_of_the_same_name() -> None:
    store = Store()
    store.put(_object("Service", "a", 9, uid="2"))
    store.remove(_object("Service", "a", 7, uid="1"))
    assert _version(store) == 9


def test_a_whole_list_removes_what_a_watch_missed_and_keeps_what_is_newer() -> None:
    store = Store()
    store.put(_object("Service", "missed", 3))
    store.put(_object("Service", "newer", 12))
    store.put(_object("ConfigMap", "other-kind", 3))
    store.replace(BY_NAME["Service"], None, [_object("Service", "a", 4)], 10)
    assert _version(store, name="missed") is None
    assert _version(store, name="newer") == 12
    assert _version(store, "ConfigMap", "other-kind") == 3
    store.replace(BY_NAME["Service"], "elsewhere", [], 20)
    assert _version(store, name="newer") == 12


def test_a_resource_has_the_children_that_it_owns_and_the_pods_that_carry_its_name() -> None:
    store = Store()
    store.put(_object("Service", "own", 1))
    store.put(_object("Service", "of-a-predecessor", 1, owner="earlier"))
    store.put(_object("Pod", "engine", 1, owner="statefulset"))
    live = store.live(_KEY, "resource")
    assert list(live.children) == [("Service", "own")]
    assert [pod["metadata"]["name"] for pod in live.pods] == ["engine"]


_STEPS = st.lists(st.tuples(st.sampled_from(["put", "remove"]), st.integers(1, 30)), max_size=30)


@given(_STEPS)
def test_whatever_the_order_of_events_the_newest_one_decides(steps: list[tuple[str, int]]) -> None:
    # Versions are unique in a cluster: the first use of one says what happened at it.
    history = {version: step for step, version in reversed(steps)}
    store = Store()
    for _, version in steps:
        found = _object("Service", "a", version)
        if history[version] == "put":
            store.put(found)
        else:
            store.remove(found)
    newest = max(history, default=None)
    expected = newest if newest is not None and history[newest] == "put" else None
    assert _version(store) == expected


def test_a_watch_that_owes_something_for_too_long_is_dead() -> None:
    lag = WatchLag()
    lag.delivered(_object("Service", "a", 5))
    lag.listed("Service", [_object("Service", "a", 5)], now=0)
    assert lag.dead(now=1000) == []
    lag.listed("Service", [_object("Service", "a", 6), _object("Service", "b", 7)], now=0)
    assert lag.dead(now=GRACE_SECONDS) == []
    assert lag.dead(now=GRACE_SECONDS + 1) == ["Service"]
    lag.delivered(_object("Service", "a", 6))
    assert lag.dead(now=GRACE_SECONDS + 1) == ["Service"]
    lag.delivered(_object("Service", "b", 9))
    assert lag.dead(now=GRACE_SECONDS + 1) == []


def test_a_watch_owes_nothing_for_what_is_gone() -> None:
    lag = WatchLag()
    lag.listed("Service", [_object("Service", "a", 6)], now=0)
    lag.listed("Service", [], now=50)
    assert lag.dead(now=1000) == []
