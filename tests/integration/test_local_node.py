"""The local node with real processes: small Python programs as containers."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvloop.node.errors import NodeUnavailable, NoSuchPod, PodsNotReady, PortTaken, UnsupportedManifest
from kvloop.node.forward import forwarded
from kvloop.node.images import ProcessImage
from kvloop.node.node import LocalNode, NodeSettings
from kvloop.node.pod import PodStatus
from kvloop.node.restarts import BackOff
from tests.unit.cli.node_manifests import (
    Manifest,
    config_map,
    container,
    deployment,
    field_ref,
    pod_template,
    stateful_set,
)

SERVER = Path(__file__).with_name("node_server.py")
IMAGES = {"image": ProcessImage(path=(Path(sys.executable).parent,))}
PATIENT = {"periodSeconds": 1, "timeoutSeconds": 20}
READY = {"readinessProbe": {"httpGet": {"port": "http", "path": "/ready"}, **PATIENT}}
LIVE = {"livenessProbe": {"httpGet": {"port": "http", "path": "/live"}, **PATIENT, "failureThreshold": 1}}
FAST = NodeSettings(back_off=BackOff(base=0.05, limit=1), probe_period_limit=0.1, shutdown_grace=2)


def server(*args: str, **fields: Any) -> Manifest:
    """A container that runs ``node_server.py``; it is ready unless told otherwise."""
    env = [field_ref("POD_IP", "status.podIP"), *fields.pop("env", [])]
    ports = [{"name": "http", "containerPort": 8000}]
    return container("python", str(SERVER), "$(POD_IP)", args=list(args), env=env, ports=ports, **{**READY, **fields})


def one(**fields: Any) -> Manifest:
    return stateful_set("x", pod_template(server(**fields)))


@asynccontextmanager
async def running(
    manifests: Iterable[Manifest], state_dir: Path, settings: NodeSettings = FAST
) -> AsyncIterator[LocalNode]:
    async with asyncio.timeout(200), LocalNode(manifests, IMAGES, state_dir=state_dir, settings=settings) as node:
        yield node


def pod(node: LocalNode, name: str) -> PodStatus:
    [found] = [status for status in node.pods() if status.name == name]
    return found


async def get(status: PodStatus, path: str) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"http://{status.address}:8000{path}") as response:
        return await response.json()


def engines(node: LocalNode) -> list[dict[str, str]]:
    entries: list[dict[str, str]] = json.loads(node.engines_file.read_text())
    return entries


def exists(path: str) -> bool:
    return Path(path).exists()


def ready_when(command: str) -> Manifest:
    return {"readinessProbe": {"exec": {"command": ["sh", "-c", command]}, **PATIENT}}


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_pods_run_at_addresses_of_their_own_and_become_ready(tmp_path: Path) -> None:
    async with running([stateful_set("x", pod_template(server()), replicas=2)], tmp_path) as node:
        await node.ready()

        answers = [await get(status, "/") for status in node.pods()]

    assert [answer["environment"]["HOSTNAME"] for answer in answers] == ["x-0", "x-1"]
    assert len({answer["environment"]["POD_IP"] for answer in answers}) == 2


async def test_two_nodes_of_one_machine_do_not_collide(tmp_path: Path) -> None:
    async with running([one()], tmp_path / "a") as first, running([one()], tmp_path / "b") as second:
        await first.ready()
        await second.ready()

        assert pod(first, "x-0").address != pod(second, "x-0").address


async def test_volumes_are_where_the_rewritten_paths_say(tmp_path: Path) -> None:
    volumes = [{"name": "c", "configMap": {"name": "c"}}, {"name": "scratch", "emptyDir": {}}]
    mounts = [{"name": "c", "mountPath": "/etc/app"}, {"name": "scratch", "mountPath": "/scratch"}]
    template = pod_template(server("/etc/app/text", volumeMounts=mounts), volumes=volumes)

    async with running([config_map("c", text="see /scratch/x"), stateful_set("x", template)], tmp_path) as node:
        await node.ready()
        answer = await get(pod(node, "x-0"), "/")

        directory = answer["file"].removeprefix("see ").removesuffix("/x")
        assert exists(directory)
        node.apply([config_map("c", text="changed"), stateful_set("x", template)])
        assert (await get(pod(node, "x-0"), "/"))["file"] == "changed"
    assert not exists(directory)


async def test_init_containers_run_in_order_and_are_repeated_until_they_succeed(tmp_path: Path) -> None:
    log = tmp_path / "order"
    fails_once = f"echo first >> {log}; test $(wc -l < {log}) -gt 1"
    template = pod_template(
        container("sh", "-c", f"echo main >> {log}; exec sleep 60", **ready_when(f"grep main {log}")),
        initContainers=[
            {**container("sh", "-c", fails_once), "name": "one"},
            {**container("sh", "-c", f"echo second >> {log}"), "name": "two"},
        ],
    )

    async with running([stateful_set("x", template)], tmp_path / "state") as node:
        await node.ready()

    assert log.read_text().split() == ["first", "first", "second", "main"]


async def test_a_pod_that_is_not_ready_is_not_an_engine_and_becomes_one_when_it_is(tmp_path: Path) -> None:
    switch = tmp_path / "ready"
    template = pod_template(
        server(env=[{"name": "READY_FILE", "value": str(switch)}]), labels={"kvloop.io/role": "decode"}
    )

    async with running([stateful_set("x", template)], tmp_path / "state") as node:
        await node.wait_for(lambda: pod(node, "x-0").containers[0].running)
        assert engines(node) == []

        switch.touch()
        await node.wait_for(lambda: [entry["name"] for entry in engines(node)] == ["x-0"])

        switch.unlink()
        await node.wait_for(lambda: engines(node) == [])


async def test_a_container_that_dies_is_restarted_as_another_engine(tmp_path: Path) -> None:
    template = pod_template(server(), labels={"kvloop.io/role": "prefill"})

    async with running([stateful_set("x", template)], tmp_path) as node:
        await node.ready()
        [before] = engines(node)
        old = await get(pod(node, "x-0"), "/")
        os.kill(old["pid"], signal.SIGKILL)
        await node.wait_for(lambda: pod(node, "x-0").restarts == 1)
        await node.ready()
        [after] = engines(node)
        new = await get(pod(node, "x-0"), "/")

    assert (after["name"], after["url"]) == (before["name"], before["url"])
    assert after["podUID"] != before["podUID"]
    assert new["pid"] != old["pid"]


async def test_a_failing_liveness_probe_restarts_the_container(tmp_path: Path) -> None:
    sick = tmp_path / "sick"
    up = {"startupProbe": {"tcpSocket": {"port": "http"}, **PATIENT, "failureThreshold": 60}}
    manifest = one(env=[{"name": "SICK_FILE", "value": str(sick)}], **up, **LIVE)

    async with running([manifest], tmp_path / "state") as node:
        await node.ready()
        sick.touch()
        await node.wait_for(lambda: pod(node, "x-0").restarts == 1)
        sick.unlink()

        await node.ready(restarts=10)


async def test_startup_holds_the_other_probes_back(tmp_path: Path) -> None:
    started = tmp_path / "started"
    startup = {"httpGet": {"port": 8000, "path": "/ready"}, **PATIENT, "failureThreshold": 600}
    readiness = {"tcpSocket": {"port": 8000}, **PATIENT}
    env = [{"name": "READY_FILE", "value": str(started)}]
    manifest = one(env=env, startupProbe=startup, readinessProbe=readiness, **LIVE)

    async with running([manifest], tmp_path / "state") as node:
        await node.wait_for(lambda: pod(node, "x-0").containers[0].running)
        assert not pod(node, "x-0").ready

        started.touch()
        await node.ready()

        assert pod(node, "x-0").restarts == 0


async def test_a_crash_loop_is_reported_with_the_log(tmp_path: Path) -> None:
    crashing = stateful_set("x", pod_template(container("sh", "-c", "echo out of luck; exit 3")))

    async with running([crashing], tmp_path, NodeSettings(back_off=BackOff(base=600))) as node:
        await node.wait_for(lambda: pod(node, "x-0").state == "CrashLoopBackOff")
        status = pod(node, "x-0")
        with pytest.raises(
            PodsNotReady, match=r"x-0 keeps failing: CrashLoopBackOff \(exit status 3\), log: .*main.log"
        ):
            await node.ready(restarts=2)

    assert status.restarts == 2
    assert status.containers[0].log.read_text() == "out of luck\n" * 2


async def test_a_program_that_cannot_be_executed_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)

    async with running([stateful_set("x", pod_template(container(str(broken))))], tmp_path / "state") as node:
        with pytest.raises(PodsNotReady, match="No such file or directory"):
            await node.ready()


async def test_pods_end_with_pre_stop_then_sigterm(tmp_path: Path) -> None:
    events = tmp_path / "events"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", f"echo hook >> {events}"]}}}
    manifest = one(env=[{"name": "EVENTS_FILE", "value": str(events)}], lifecycle=hook)

    async with running([manifest], tmp_path / "state") as node:
        await node.ready()
        old = pod(node, "x-0")
        await node.delete_pod("x-0")
        assert events.read_text().split() == ["hook", "SIGTERM"]
        await node.ready()

        assert pod(node, "x-0").uid != old.uid


async def test_a_process_that_ignores_sigterm_is_killed_when_the_grace_period_is_over(tmp_path: Path) -> None:
    stubborn = pod_template(server(env=[{"name": "STUBBORN", "value": "1"}]))

    async with running([stateful_set("x", stubborn)], tmp_path) as node:
        await node.ready()
        pid = (await get(pod(node, "x-0"), "/"))["pid"]

        await node.delete_pod("x-0", grace=0.2)

        assert not is_alive(pid)


async def test_a_hook_that_outlives_the_grace_period_does_not_hold_the_pod(tmp_path: Path) -> None:
    events = tmp_path / "events"
    manifest = one(
        env=[{"name": "EVENTS_FILE", "value": str(events)}], lifecycle={"preStop": {"sleep": {"seconds": 3600}}}
    )

    async with running([manifest], tmp_path / "state") as node:
        await node.ready()
        await node.delete_pod("x-0", grace=0.2)

    assert events.read_text().split()[0] == "SIGTERM"


async def test_what_a_container_leaves_behind_goes_with_it(tmp_path: Path) -> None:
    orphan = tmp_path / "orphan"
    script = f"(setsid sleep 1000 & echo $! > {orphan}.new; mv {orphan}.new {orphan}); exec sleep 1000"

    template = pod_template(container("sh", "-c", script, **ready_when(f"test -e {orphan}")))

    async with running([stateful_set("x", template)], tmp_path / "state") as node:
        await node.ready()
        pid = int(orphan.read_text())
        assert is_alive(pid)

        await node.delete_pod("x-0")

        assert not is_alive(pid)


async def test_scaling_up_and_down(tmp_path: Path) -> None:
    template = pod_template(server())

    async with running([stateful_set("x", template)], tmp_path) as node:
        await node.ready()
        first = pod(node, "x-0").uid
        node.apply([stateful_set("x", template, replicas=3)])
        await node.ready()
        assert [status.name for status in node.pods()] == ["x-0", "x-1", "x-2"]
        node.apply([stateful_set("x", template, replicas=1)])
        await node.ready()

        assert [(status.name, status.uid) for status in node.pods()] == [("x-0", first)]
        node.apply([])
        await node.ready()
        assert node.pods() == ()


async def test_a_new_template_replaces_pods_and_a_partition_holds_them(tmp_path: Path) -> None:
    old = pod_template(server(env=[{"name": "VERSION", "value": "1"}]))
    new = pod_template(server(env=[{"name": "VERSION", "value": "2"}]))

    async with running([stateful_set("x", old, replicas=2, partition=2)], tmp_path) as node:
        await node.ready()
        node.apply([stateful_set("x", new, replicas=2, partition=1)])
        await node.ready()
        versions = [(await get(status, "/"))["environment"]["VERSION"] for status in node.pods()]
        assert versions == ["1", "2"]

        await node.delete_pod("x-0")
        await node.ready()
        assert (await get(pod(node, "x-0"), "/"))["environment"]["VERSION"] == "1"


async def test_a_deployment_is_updated_without_a_gap(tmp_path: Path) -> None:
    async with running([deployment("x", pod_template(server()))], tmp_path) as node:
        await node.ready()
        [old] = node.pods()
        node.apply([deployment("x", pod_template(server(env=[{"name": "V", "value": "2"}])))])
        least = 1

        def settled() -> bool:
            nonlocal least
            least = min(least, sum(status.ready for status in node.pods()))
            return [status.ready for status in node.pods()] == [True] and node.pods()[0].uid != old.uid

        await node.wait_for(settled)

    assert least == 1


async def test_nothing_changes_when_manifests_are_refused(tmp_path: Path) -> None:
    async with running([one()], tmp_path) as node:
        await node.ready()
        uid = pod(node, "x-0").uid
        with pytest.raises(UnsupportedManifest):
            node.apply([one(tty=True)])
        await node.ready()

        assert pod(node, "x-0").uid == uid
        with pytest.raises(NoSuchPod):
            await node.delete_pod("y-0")


async def test_the_image_is_told_which_processes_are_ready(tmp_path: Path) -> None:
    seen: list[list[int]] = []
    images = {"image": ProcessImage(path=IMAGES["image"].path, when_ready=lambda pids: seen.append(list(pids)))}

    async with asyncio.timeout(200), LocalNode([one()], images, state_dir=tmp_path, settings=FAST) as node:
        await node.ready()
        pid = (await get(pod(node, "x-0"), "/"))["pid"]

    assert len(seen) == 1
    assert pid in seen[0]


NODE_PROGRAM = """
import asyncio, json, sys
from pathlib import Path
from kvloop.node.images import ProcessImage
from kvloop.node.node import LocalNode

async def main():
    images = {"image": ProcessImage(path=(Path(sys.executable).parent,))}
    async with LocalNode(json.loads(sys.argv[1]), images, state_dir=Path(sys.argv[2])) as node:
        await node.ready()
        print(node.pods()[0].address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def test_nothing_is_left_when_the_node_is_killed(tmp_path: Path) -> None:
    manifests = json.dumps([one(env=[{"name": "STUBBORN", "value": "1"}])])
    command = [sys.executable, "-c", NODE_PROGRAM, manifests, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        address = node.stdout.readline().strip()
        with urllib.request.urlopen(f"http://{address}:8000/") as response:
            container_process = os.pidfd_open(json.load(response)["pid"])
        node.kill()
    try:
        # A process's descriptor becomes readable when the process ends.
        readable, _, _ = select.select([container_process], [], [], 60)
        assert readable == [container_process]
    finally:
        os.close(container_process)


async def test_a_state_directory_belongs_to_one_node_at_a_time(tmp_path: Path) -> None:
    async with running([one()], tmp_path):
        with pytest.raises(NodeUnavailable, match="another node runs in"):
            async with running([one()], tmp_path):
                pass
    async with running([one()], tmp_path) as node:
        await node.ready()


async def test_a_forwarded_port_leads_to_the_pod_that_is_there_now(tmp_path: Path) -> None:
    async with running([one()], tmp_path) as node:

        def target() -> tuple[str, int] | None:
            ready = [status.address for status in node.pods() if status.ready]
            return (ready[0], 8000) if ready else None

        async with forwarded(0, target) as port, aiohttp.ClientSession() as session:
            for _ in range(2):
                await node.ready()
                async with session.get(f"http://127.0.0.1:{port}/") as response:
                    assert (await response.json())["environment"]["POD_IP"] == pod(node, "x-0").address
                await node.delete_pod("x-0")


async def test_a_forwarded_connection_ends_when_no_pod_is_ready() -> None:
    async with forwarded(0, lambda: None) as port, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"http://127.0.0.1:{port}/")


async def test_a_forwarded_port_that_is_taken_is_refused() -> None:
    async with forwarded(0, lambda: None) as port:
        with pytest.raises(PortTaken, match=str(port)):
            async with forwarded(port, lambda: None):
                pass


async def test_shared_memory_of_a_killed_container_goes_with_it(tmp_path: Path) -> None:
    name = f"kvloop-test-{tmp_path.name}-{os.getpid()}"
    # Written by hand: Python's own shared memory is removed by a helper process where its owner is killed.
    program = f"""
import mmap, os, time
file = open("/dev/shm/{name}.new", "w+b")
file.truncate(4096)
mapped = mmap.mmap(file.fileno(), 0)
os.rename(file.name, "/dev/shm/{name}")
time.sleep(1000)
"""
    exists_command = f"test -e /dev/shm/{name}"
    template = pod_template(container("python", "-c", program, **ready_when(exists_command)))

    async with running([stateful_set("x", template)], tmp_path) as node:
        await node.ready()
        node.apply([])
        await node.delete_pod("x-0", grace=0)

    assert not exists(f"/dev/shm/{name}")
