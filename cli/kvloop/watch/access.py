"""The way to routers' admin ports: by URL and token file, or by a resource's name, through ``kubectl port-forward``."""

from __future__ import annotations

import argparse
import base64
import json
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvloop_operator import names

_SECONDS = 10
_FORWARDING = re.compile(r"Forwarding from (127\.0\.0\.1:\d+)")


class AccessError(Exception):
    """A router cannot be asked; the message names the cause and what to do."""


class NotFound(AccessError):
    """The router does not know what was asked for."""


@dataclass(frozen=True, slots=True)
class RouterAdmin:
    """A router's admin port. ``name``: for people."""

    name: str
    url: str
    token: str

    def text(self, path: str) -> str:
        """What a GET of ``path`` gives. Raises AccessError."""
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.token}"})  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS) as response:  # noqa: S310
                body: bytes = response.read()
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 401:
                raise AccessError(f"{self.url} refuses the token: it is the one in the Secret's admin-token") from error
            if error.code == 404:
                raise NotFound(f"{self.url} has no {path}") from error
            raise AccessError(f"{self.url} answers with status {error.code}") from error
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise AccessError(f"{self.url} cannot be reached: {reason}; it has to be the admin port, 8081") from error
        return body.decode("utf-8", "replace")

    def json(self, path: str) -> Any:
        """The same, as JSON. Raises AccessError."""
        try:
            return json.loads(self.text(path))
        except json.JSONDecodeError as error:
            raise AccessError(f"{self.url} does not answer as a kvloop router does; is it the admin port?") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How the routers are found."""
    found = parser.add_mutually_exclusive_group(required=True)
    found.add_argument("--router", metavar="URL", help="a router's admin port, such as http://127.0.0.1:8081")
    found.add_argument("--resource", metavar="NAME", help="a DisaggregatedInference, whose routers kubectl reaches")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with the admin token, for --router")
    parser.add_argument("-n", "--namespace", help="the resource's namespace; default: that of kubectl's context")
    parser.add_argument("--context", help="kubectl's context; default: the current one")
    parser.add_argument("--kubectl", default="kubectl", help=argparse.SUPPRESS)


@contextmanager
def routers(arguments: argparse.Namespace) -> Iterator[list[RouterAdmin]]:
    """The routers that the arguments name, at least one. Raises AccessError."""
    if arguments.router is None:
        with ExitStack() as stack:
            yield _by_resource(arguments, stack)
        return
    if urlsplit(arguments.router).scheme not in ("http", "https"):
        raise AccessError(f"--router {arguments.router}: a URL such as http://127.0.0.1:8081 is needed")
    if arguments.token_file is None:
        raise AccessError("--router needs --token-file: the admin port answers nobody without a token")
    try:
        token = arguments.token_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise AccessError(f"--token-file {arguments.token_file}: {error.strerror}") from error
    yield [RouterAdmin(arguments.router, arguments.router.rstrip("/"), token)]


def _by_resource(arguments: argparse.Namespace, stack: ExitStack) -> list[RouterAdmin]:
    command = [arguments.kubectl]
    for option in ("context", "namespace"):
        if getattr(arguments, option) is not None:
            command.append(f"--{option}={getattr(arguments, option)}")
    labels = ",".join(f"{label}={value}" for label, value in names.selector(arguments.resource, names.ROUTER).items())
    pods = _kubectl(command, "get", "pods", f"--selector={labels}", "--field-selector=status.phase=Running", "-oname")
    if not pods.split():
        raise AccessError(f"no router of {arguments.resource} runs; `kubectl get dinf {arguments.resource}` says why")
    key = names.ADMIN_TOKEN_KEY
    secret = _kubectl(command, "get", "secret", names.router_name(arguments.resource), "-ojson")
    token = base64.b64decode(json.loads(secret)["data"][key]).decode().strip()
    found = []
    for pod in pods.split():
        address = stack.enter_context(_forwarded(command, pod))
        found.append(RouterAdmin(pod.removeprefix("pod/"), f"http://{address}", token))
    return found


def _kubectl(command: list[str], *arguments: str) -> str:
    try:
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)  # noqa: S603
    except FileNotFoundError as error:
        raise AccessError(
            f"--resource needs {command[0]}, which is not there; use --router and --token-file"
        ) from error
    if done.returncode != 0:
        raise AccessError(f"kubectl {arguments[0]} {arguments[1]}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _forwarded(command: list[str], pod: str) -> Iterator[str]:
    arguments = [*command, "port-forward", "--address=127.0.0.1", pod, f":{names.ADMIN_PORT}"]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # noqa: S603
    try:
        assert process.stdout is not None  # noqa: S101  it is a pipe
        first = process.stdout.readline()
        found = _FORWARDING.match(first)
        if found is None:
            raise AccessError(f"kubectl port-forward to {pod} says: {first.strip() or 'nothing'}")
        yield found[1]
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
