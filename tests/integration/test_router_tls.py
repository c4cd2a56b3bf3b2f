"""TLS to clients and to engines, and certificates that change while the router runs."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvloop_connector.settings import Role
from kvloop_router.config import EngineTLS, ListenTLS
from kvloop_router.errors import InvalidConfig
from kvloop_router.tls import Calling, Serving
from tests.cluster.credentials import Authority
from tests.harness.engines import Engines, Kind, start
from tests.integration.router_process import RouterUnderTest, chat_body, routing, scripted, until
from tests.integration.scripted_engine import ANSWER, ScriptedEngine, running
from tests.integration.simulated import spec
from tests.integration.test_router_simulated import MORE, WORK, cold_text, holds_nothing, say

HERE = ("IP:127.0.0.1",)


def created(folder: Path) -> Authority:
    authority = Authority(folder)
    authority.create()
    return authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return created(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return created(tmp_path_factory.mktemp("other"))


@pytest.fixture
def listen(tmp_path: Path, authority: Authority) -> dict[str, str]:
    certificate, key = authority.issue("router", user="router", hosts=HERE)
    shutil.copy(certificate, tmp_path / "tls.crt")
    shutil.copy(key, tmp_path / "tls.key")
    return {"certificateFile": str(tmp_path / "tls.crt"), "keyFile": str(tmp_path / "tls.key")}


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))


def engine_context(authority: Authority, *hosts: str, clients: Authority | None = None) -> ssl.SSLContext:
    certificate, key = authority.issue("engine", user="engine", hosts=hosts)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients.certificate)
    return context


def serving_files(certificate: Path, key: Path) -> ListenTLS:
    return ListenTLS.model_validate({"certificateFile": str(certificate), "keyFile": str(key)})


async def answered(router: RouterUnderTest, context: ssl.SSLContext) -> str:
    url = router.url.replace("http://", "https://") + "/v1/chat/completions"
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session,
        session.post(url, json=chat_body("hello")) as response,
    ):
        return str((await response.json())["choices"][0]["message"]["content"])


async def test_clients_that_trust_the_authority_are_served_and_others_are_not(
    tmp_path: Path,
    prefill: ScriptedEngine,
    decode: ScriptedEngine,
    listen: dict[str, str],
    authority: Authority,
    other_authority: Authority,
) -> None:
    async with scripted(tmp_path, prefill, decode, listen={"tls": listen}) as router:
        assert await answered(router, trusting(authority)) == ANSWER
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await answered(router, trusting(other_authority))
        with pytest.raises(aiohttp.ClientError):
            await router.get("/healthz")


async def test_nothing_older_than_1_2_is_spoken(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, listen: dict[str, str], authority: Authority
) -> None:
    old = trusting(authority)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("DEFAULT:@SECLEVEL=0")
    async with scripted(tmp_path, prefill, decode, listen={"tls": listen}) as router:
        with pytest.raises(aiohttp.ClientConnectorError):
            await answered(router, old)


async def test_a_new_certificate_is_shown_without_a_restart_and_a_bad_one_is_not(
    tmp_path: Path,
    prefill: ScriptedEngine,
    decode: ScriptedEngine,
    listen: dict[str, str],
    authority: Authority,
    other_authority: Authority,
) -> None:
    async with scripted(tmp_path, prefill, decode, listen={"tls": listen}) as router:
        assert router.router is not None
        assert await answered(router, trusting(authority)) == ANSWER
        certificate, key = other_authority.issue("router", user="router", hosts=HERE)
        await asyncio.to_thread(shutil.copy, certificate, listen["certificateFile"])
        # Its key is still the old one: a reader can meet files between two writes.
        router.router.reloading.look()
        assert await answered(router, trusting(authority)) == ANSWER
        await asyncio.to_thread(shutil.copy, key, listen["keyFile"])
        router.router.reloading.look()
        assert await answered(router, trusting(other_authority)) == ANSWER


async def test_engines_are_spoken_to_over_tls_both_sides_shown(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, authority: Authority, other_authority: Authority
) -> None:
    prefill.tls = engine_context(authority, "DNS:engines", clients=other_authority)
    decode.tls = engine_context(authority, "DNS:engines", clients=other_authority)
    certificate, key = other_authority.issue("router-to-engines", user="router")
    tls = {
        "caFile": str(authority.certificate),
        "serverName": "engines",
        "certificateFile": str(certificate),
        "keyFile": str(key),
    }
    async with scripted(tmp_path, prefill, decode, engineTls=tls) as router:
        first = await router.chat("a question that is long enough to be worth a pull", stream=True)
        second = await router.chat("a question that is long enough to be worth a pull", ANSWER, "more")

    assert (first.status, first.content, second.path) == (200, ANSWER, "warm")


async def test_an_engine_that_cannot_show_who_it_is_gets_no_turn(
    tmp_path: Path, prefill: ScriptedEngine, decode: ScriptedEngine, authority: Authority, other_authority: Authority
) -> None:
    prefill.tls = engine_context(authority, "DNS:engines")
    decode.tls = engine_context(authority, "DNS:engines")
    impostor = ScriptedEngine("decode-1", decode.role, tls=engine_context(other_authority, "DNS:engines"))
    elsewhere = ScriptedEngine("decode-2", decode.role, tls=engine_context(authority, "DNS:elsewhere"))
    tls = {"caFile": str(authority.certificate), "serverName": "engines"}
    async with scripted(tmp_path, prefill, decode, engineTls=tls) as router, running(impostor), running(elsewhere):
        assert router.router is not None
        router.list_engines([engine.entry() for engine in (prefill, decode, impostor, elsewhere)])
        engines = router.router.engines

        def checked() -> bool:
            others = [engines.get(engine.name) for engine in (impostor, elsewhere)]
            return all(other is not None and other.health.checks_failed for other in others)

        await until(checked)
        answers = [await router.chat(f"hello {number}") for number in range(6)]

    assert {got.headers["X-Kvloop-Decode"] for got in answers} == {"decode-0"}
    assert impostor.asked == elsewhere.asked == []


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Engines]:
    """In the midst of a rollout: a decode engine as it was before, and its successor and a prefill engine with TLS."""
    certificate, key = authority.issue("engines", user="engines", hosts=("DNS:engines",))
    # As an engine's container gets it.
    shown = ("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key), "--enable-ssl-refresh")
    trust = trusting(authority)
    trust.check_hostname = False
    specs = [spec(Role.DECODE), *(spec(role, *shown, tls=trust) for role in Role)]
    with start(Kind.SIM, tmp_path_factory.mktemp("engines"), specs) as started:
        yield started


async def test_a_conversation_stays_warm_while_engines_are_replaced_by_such_with_tls(
    tmp_path: Path, engines: Engines, authority: Authority
) -> None:
    trust = {"caFile": str(authority.certificate), "serverName": "engines"}
    before, after = engines.decode
    listed: dict[str, Any] = {entry["name"]: entry for entry in engines.as_discovery_file()}
    assert [listed[each.name]["url"].partition(":")[0] for each in (before, after)] == ["http", "https"]
    prefill = listed[engines.prefill[0].name]
    stages = (
        [prefill, listed[before.name]],
        [prefill, listed[before.name] | {"draining": True}, listed[after.name]],
        [prefill, listed[after.name]],
    )
    contents, turns = [WORK], []
    async with routing(tmp_path, stages[0], engineTls=trust, kvTransfer={"kvRecomputeThreshold": 64}) as router:
        assert router.router is not None
        pool = router.router.engines
        for stage in stages:
            router.list_engines(stage)
            names = {entry["name"] for entry in stage}

            def serve(names: set[str] = names) -> bool:
                return {each.spec.name for each in pool} == names and all(each.healthy for each in pool)

            await until(serve)
            got = await say(router, *contents, stream=True)
            turns.append((got.path, got.headers["X-Kvloop-Decode"]))
            assert got.content == await cold_text(router, *contents)
            contents += [got.content, MORE]

    assert turns == [("cold", before.name), ("warm", after.name), ("warm", after.name)]
    await holds_nothing(after)


class TestFiles:
    def test_files_that_are_not_certificates_are_named(self, tmp_path: Path, authority: Authority) -> None:
        certificate, key = authority.issue("router", user="router", hosts=HERE)
        other = tmp_path / "other"
        other.write_text("no certificate")

        for files in ((other, key), (certificate, other), (certificate, tmp_path / "missing")):
            with pytest.raises(InvalidConfig, match=r"listen\.tls"):
                Serving(serving_files(*files))
        for ca in (other, tmp_path / "missing"):
            with pytest.raises(InvalidConfig, match=r"engineTls\.caFile"):
                Calling(EngineTLS.model_validate({"caFile": str(ca)}))
        own = {"certificateFile": str(certificate), "keyFile": str(other)}
        with pytest.raises(InvalidConfig, match="engineTls"):
            Calling(EngineTLS.model_validate({"caFile": str(authority.certificate), **own}))

    def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(
        self, tmp_path: Path, authority: Authority
    ) -> None:
        certificate, key = authority.issue("router", user="router", hosts=HERE)
        locked = tmp_path / "locked"
        subprocess.run(
            ["openssl", "ec", "-in", key, "-out", locked, "-aes256", "-passout", "pass:word"],
            check=True,
            capture_output=True,
        )

        with pytest.raises(InvalidConfig, match="password"):
            Serving(serving_files(certificate, locked))
