"""What ``kvloop explain`` shows of what a router tells, and how it finds a router."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path
from typing import Any

import pytest

from kvloop.__main__ import main
from kvloop.watch import access
from kvloop.watch.access import AccessError
from kvloop.watch.explained import explained, recent

TURN: dict[str, Any] = {
    "request_id": "7f3a",
    "api": "/v1/chat/completions",
    "model": "tiny",
    "path": "cold",
    "reason": "below_threshold",
    "prompt_tokens": 1812,
    "retained_tokens": None,
    "proven_tokens": 48,
    "reused_tokens": 0,
    "prefill": "demo-prefill-0",
    "decode": "demo-decode-1",
    "status": 200,
    "streamed": True,
    "broken": False,
    "no_handle": "",
    "attempts": ["decode demo-decode-0: status 500"],
    "expected": {"cold": 0.161, "warm": 0.0505},
    "seconds": 12.3456,
    "ttft_seconds": 0.158,
    "prefill_seconds": 0.15,
    "phase": "stream",
    "at": 1795953600.0,
    "legs": [
        {"leg": "tokenize", "engine": "demo-decode-1", "began": 0.0004, "seconds": 0.0021, "outcome": "ok"},
        {"leg": "prefill", "engine": "demo-prefill-0", "began": 0.003, "seconds": 0.15, "outcome": "ok"},
        {"leg": "decode", "engine": "demo-decode-0", "began": 0.153, "seconds": 0.001, "outcome": "failed"},
        {"leg": "decode", "engine": "demo-decode-1", "began": 0.156, "seconds": 12.19, "outcome": "ok"},
    ],
    "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
}
TOLD: dict[str, Any] = {
    "turn": TURN,
    "why": "what is equal is less than kvRecomputeThreshold",
    "tokens": {"prompt": 1812, "retained": None, "reusable": 48, "reused": 0, "computed": 1812},
    "before": {
        "request_id": "5b21",
        "seconds_before": 31.5,
        "path": "warm",
        "no_handle": "",
        "prompt_tokens": 1700,
    },
    "history": {
        "messages": 14,
        "equal_messages": 3,
        "changes": [
            {
                "how": "reasoning_stripped",
                "message": 4,
                "role": "assistant",
                "detail": "its reasoning is gone; its text is the same",
            }
        ],
    },
    "template": {
        "model": "tiny",
        "appendOnly": False,
        "cases": [{"case": "answer", "verdict": "append_only"}, {"case": "reasoning", "verdict": "dropped"}],
    },
}

SHOWN = """\
Turn      7f3a  /v1/chat/completions  2026-11-29 12:00:00Z  status 200, streamed
Path      cold (below_threshold): what is equal is less than kvRecomputeThreshold
Expected  cold 161.0 ms, warm 50.5 ms
Engines   prefill demo-prefill-0, decode demo-decode-1
Tokens    prompt 1,812, reusable 48, reused 0, computed 1,812
Times     first byte 158.0 ms, whole 12.35 s
Leg       tokenize demo-decode-1           after 0.4 ms, for 2.1 ms: ok
          prefill  demo-prefill-0          after 3.0 ms, for 150.0 ms: ok
          decode   demo-decode-0           after 153.0 ms, for 1.0 ms: failed
          decode   demo-decode-1           after 156.0 ms, for 12.19 s: ok
Failed    decode demo-decode-0: status 500
Before    5b21, 31.5 s earlier, warm, left a handle
History   14 messages, of which the first 3 are those of the turn before
          message 4 (assistant): reasoning stripped: its reasoning is gone; its text is the same
Template  NOT append-only (answer: append only, reasoning: dropped)
After     left a handle for the next turn
Trace     4bf92f3577b34da6a3ce929d0e0e4736
"""


def test_a_turn_is_shown_as_people_read_it() -> None:
    assert explained(TOLD) == SHOWN


def test_a_turn_of_which_little_is_known() -> None:
    turn = {**TURN, "status": 499, "attempts": [], "legs": [], "ttft_seconds": None, "trace_id": ""}
    tokens = {"prompt": None, "retained": None, "reusable": 0, "reused": 0, "computed": None}
    little = {"turn": turn, "why": "", "tokens": tokens, "before": None, "history": None, "template": None}

    text = explained(little)

    assert "the client left, streamed" in text
    assert "prompt ?, reusable 0" in text
    assert "no turn of this conversation" in text
    assert "left a handle" not in text


def test_recent_turns_stand_below_one_another() -> None:
    other = {**TURN, "request_id": "a-longer-id", "path": "warm", "reason": "", "status": 200}

    assert recent([TURN, other]) == (
        "WHEN                  STATUS  PATH  REASON           REQUEST ID\n"
        "2026-11-29 12:00:00Z  200     cold  below_threshold  7f3a\n"
        "2026-11-29 12:00:00Z  200     warm  -                a-longer-id\n"
    )
    assert recent([]) == "No turn was played yet.\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--router", "http://127.0.0.1:9"], "--token-file"),
        (["--router", "localhost:8081", "--token-file", "TOKEN"], "a URL such as"),
        (["--router", "http://127.0.0.1:9", "--token-file", "nowhere"], "nowhere: No such file"),
        (["--router", "http://127.0.0.1:9", "--token-file", "TOKEN"], "cannot be reached"),
        (["--resource", "demo", "--kubectl", "no-kubectl"], "needs no-kubectl"),
    ],
)
def test_what_is_wrong_is_said_with_its_remedy(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("secret-token\n")
    arguments = [str(token) if argument == "TOKEN" else argument for argument in arguments]

    assert main(["explain", "one", *arguments]) == 1

    message = capsys.readouterr().err
    assert message.startswith("kvloop explain: ")
    assert said in message
    assert "secret-token" not in message


_KUBECTL = """\
#!/bin/sh
echo "$@" >> "$0.said"
case "$*" in
  *"get pods"*) printf 'pod/demo-router-a\\npod/demo-router-b\\n' ;;
  *"get secret"*) echo '{"data": {"admin-token": "dG9rZW4="}}' ;;
  *port-forward*demo-router-a*) echo "Forwarding from 127.0.0.1:4711 -> 8081"; exec sleep 60 ;;
  *port-forward*) echo "Forwarding from 127.0.0.1:4712 -> 8081"; exec sleep 60 ;;
esac
"""


def by_resource(kubectl: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    access.add_arguments(parser)
    return parser.parse_args(["--resource", "demo", "-n", "team", "--kubectl", str(kubectl)])


def script(directory: Path, text: str) -> Path:
    kubectl = directory / "kubectl"
    kubectl.write_text(text)
    kubectl.chmod(kubectl.stat().st_mode | stat.S_IXUSR)
    return kubectl


def test_a_resource_leads_to_all_of_its_routers(tmp_path: Path) -> None:
    kubectl = script(tmp_path, _KUBECTL)

    with access.routers(by_resource(kubectl)) as found:
        reached = [(router.name, router.url, router.token) for router in found]

    assert reached == [
        ("demo-router-a", "http://127.0.0.1:4711", "token"),
        ("demo-router-b", "http://127.0.0.1:4712", "token"),
    ]
    said = Path(f"{kubectl}.said").read_text().splitlines()
    assert all(line.startswith("--namespace=team ") for line in said)
    assert "--selector=kvloop.io/deployment=demo,kvloop.io/role=router" in said[0]
    assert "secret demo-router" in said[1]
    assert said[2].endswith("port-forward --address=127.0.0.1 pod/demo-router-a :8081")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("#!/bin/sh\n", "no router of demo runs"),
        ("#!/bin/sh\necho 'pods is forbidden' >&2; exit 1\n", "kubectl get pods: pods is forbidden"),
        (_KUBECTL.replace("Forwarding", "Error"), "port-forward to pod/demo-router-a says: Error from"),
    ],
)
def test_what_kubectl_cannot_do_is_said(text: str, said: str, tmp_path: Path) -> None:
    kubectl = script(tmp_path, text)

    with pytest.raises(AccessError, match=said), access.routers(by_resource(kubectl)):
        pass
