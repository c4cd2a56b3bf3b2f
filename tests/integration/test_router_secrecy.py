"""Nothing that a client sends in confidence is told to anybody: logs, metrics, admin answers and spans are searched."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvloop_router.logs import JsonFormatter
from tests.integration.router_process import MODEL, RouterUnderTest, scripted
from tests.integration.scripted_engine import ScriptedEngine, fails
from tests.integration.test_router_watch import collecting

_TURNS = 40
_LETTERS = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"


class Secrets:
    """Makes texts that occur nowhere else, and remembers them."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.made: list[str] = []

    def __call__(self) -> str:
        self.made.append("".join(self.random.choices(_LETTERS, k=24)))
        return self.made[-1]


def message(secret: Secrets) -> dict[str, Any]:
    """One message with a secret wherever there is a place for text, names included."""
    call = {"id": secret(), "type": "function", "function": {"name": secret(), "arguments": json.dumps([secret()])}}
    content = secret.random.choice([secret() * 9, [{"type": "text", "text": secret()}, {"type": secret()}], None])
    said = {"role": secret.random.choice(["user", "assistant", "system", secret()]), "content": content}
    more = {"reasoning": secret(), "tool_calls": [call], "name": secret(), secret(): secret()}
    return said | {name: value for name, value in more.items() if secret.random.random() < 0.4}


def body(secret: Secrets) -> Any:
    """A request: a chat or a completion, well-formed or not."""
    chance = secret.random.random()
    if chance < 0.15:
        return f'{{"messages": "{secret()}", {secret()}'.encode()
    if chance < 0.3:
        wrong = {"model": secret(), "messages": secret(), "stop": {secret(): 1}, "kv_transfer_params": {"a": secret()}}
        name = secret.random.choice(list(wrong))
        return {"model": MODEL, "messages": [message(secret)], name: wrong[name]}
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [message(secret) for _ in range(secret.random.randint(1, 4))],
        "stream": secret.random.random() < 0.5,
    }
    more = {
        "conversation_id": secret(),
        "cache_salt": secret(),
        "user": secret(),
        "metadata": {secret(): secret()},
        "stop": [secret()],
        "tools": [{"type": "function", "function": {"name": secret(), "description": secret()}}],
        "chat_template_kwargs": {secret(): secret()},
        "reasoning_effort": secret(),
        "n": 2,
    }
    return asked | {name: value for name, value in more.items() if secret.random.random() < 0.3}


def headers(secret: Secrets) -> dict[str, str]:
    offered = {
        "Authorization": f"Bearer {secret()}",
        "X-Conversation-ID": secret(),
        "X-Session-ID": secret(),
        "Cookie": secret(),
        "tracestate": f"vendor={secret()}",
        "User-Agent": secret(),
    }
    return {name: value for name, value in offered.items() if secret.random.random() < 0.6}


@contextmanager
def logged() -> Iterator[list[str]]:
    """Every line that any logger would write, as JSON."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler, root = Kept(), logging.getLogger()
    handler.setFormatter(JsonFormatter())
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


async def told(router: RouterUnderTest) -> str:
    """All that the router tells those who look after it."""
    turns = await router.admin("/admin/v1/turns")
    answers = [turns, *[await router.admin(f"/admin/v1/{name}") for name in ("engines", "pairs", "templates")]]
    for turn in turns["turns"]:
        for more in ("", "/explanation"):
            answers.append(await router.admin(f"/admin/v1/turns/{turn['request_id']}{more}"))
    return json.dumps(answers, ensure_ascii=False) + (await router.get("/metrics")).text


@pytest.mark.parametrize("seed", range(3))
async def test_no_secret_of_a_client_is_told(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, seed: int
) -> None:
    secret = Secrets(Random(seed))
    sessions = {"sessionHeaders": ["X-Session-ID"]}
    (tmp_path / "keys").write_text(secret() + "\n")
    key = secret.made[0]
    statuses = set()
    with logged() as lines:
        async with collecting() as collector:
            changes: dict[str, Any] = {
                **sessions,
                "apiKeysFile": str(tmp_path / "keys"),
                "tracing": {"endpoint": collector.url},
                "kvTransfer": {"connector": secret.random.choice(["NixlConnector", "KvloopConnector"])},
            }
            async with scripted(tmp_path, prefill, decode, **changes) as router:
                for number in range(_TURNS):
                    if number % 8 == 7:
                        # Engines repeat what they refuse.
                        decode.script = [fails(secret.random.choice([400, 500]), f"cannot do {secret()}")]
                    asked = body(secret)
                    given = headers(secret)
                    if secret.random.random() < 0.9:
                        given["Authorization"] = f"Bearer {key}"
                    path = secret.random.choice(["/v1/chat/completions"] * 4 + ["/v1/responses", f"/v1/{secret()}"])
                    statuses.add((await router.post(path, asked, given)).status)
                    decode.script.clear()
                    if number == _TURNS - 1:
                        await router.chat("plain", headers={"Authorization": f"Bearer {key}"})
                everything = await told(router)
            spans = repr([span.SerializeToString() for span in collector.spans])

    assert {200, 400, 401, 404} <= statuses
    assert len(collector.spans) > _TURNS / 2
    assert len(lines) > _TURNS / 2
    for name, text in (("told", everything), ("spans", spans), ("log", "\n".join(lines))):
        assert [made for made in secret.made if made in text] == [], name
    # A search that finds nothing because it looks at nothing would find nothing here either.
    assert all(MODEL in text for text in (everything, spans, "\n".join(lines)))
