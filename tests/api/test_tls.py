"""TLS at the public and the admin port: both sides' certificates, renewals, and clients without a handshake."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import httpx
import pytest

from pd_cluster.api.connections import connection_limiter
from pd_cluster.client.admin_client import Admin
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.commands.chat_command import run as chat
from pd_cluster.errors import ConfigError, PdClusterError
from pd_cluster.net.tls_files import TlsFiles, load
from pd_cluster.settings.http_settings import Tls
from pd_cluster.settings.routing_settings import ConnectionLimits
from tests.api.conftest import FLAGS
from tests.support.certificates import Certificate, make_certificate
from tests.support.cluster import LiveCluster
from tests.support.http_protocol import GET, PROBE, Client, Serving, serving, status


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    folder = tmp_path_factory.mktemp("tls")
    return {name: make_certificate(folder, name) for name in ("first", "second", "client")}


async def ask(at: Serving, tls: ssl.SSLContext | None, sent: bytes = PROBE) -> int:
    """Returns the status, or 0 without an answer."""
    try:
        client = await at.connect(tls=tls)
        await client.send(sent)
        answer = await client.answer()
    except (ConnectionError, ssl.SSLError):
        return 0
    client.close()
    return status(answer)


async def test_clients_that_trust_the_certificate_are_served(certificates: dict[str, Certificate]) -> None:
    first, second = certificates["first"], certificates["second"]
    async with serving(tls=first.tls()) as at:
        assert await ask(at, first.trusted()) == 200
        assert await ask(at, second.trusted()) == 0
        assert await ask(at, None) == 0
        old = first.trusted()
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await ask(at, old) == 200
        assert await ask(at, first.trusted(), b"NONSENSE\r\n\r\n") == 400
        await at.until("nobody is connected", lambda: not at.limiter.num_open)


@pytest.mark.parametrize("cert_reqs", [0, 1, 2])
async def test_certificates_of_clients(certificates: dict[str, Certificate], cert_reqs: int) -> None:
    server, known, unknown = certificates["first"], certificates["client"], certificates["second"]
    async with serving(tls=server.tls(known, cert_reqs)) as at:
        assert await ask(at, server.trusted()) == (0 if cert_reqs == 2 else 200)
        assert await ask(at, server.trusted(known)) == 200
        assert await ask(at, server.trusted(unknown)) == (0 if cert_reqs else 200)


async def test_a_renewed_certificate_is_shown(
    certificates: dict[str, Certificate], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New connections get the renewed certificate and old ones continue; mismatched files change nothing."""
    served = Certificate(tmp_path / "served.pem", tmp_path / "served.key")
    served.becomes(certificates["first"])

    with caplog.at_level(logging.ERROR):
        async with serving(tls=served.tls()) as at:
            old = await at.connect(tls=certificates["first"].trusted())
            served.becomes(certificates["second"])
            while await ask(at, certificates["second"].trusted()) != 200:
                await asyncio.sleep(0.05)
            assert await ask(at, certificates["first"].trusted()) == 0
            await old.send(PROBE)
            assert status(await old.answer()) == 200
            old.close()
            served.certfile.write_text("nothing")
            await at.until("the log says so", lambda: "TLS continues with the earlier files" in caplog.text)
            assert await ask(at, certificates["second"].trusted()) == 200


async def test_clients_that_never_shake_hands(
    certificates: dict[str, Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such connections count at once, are closed to make room, and have the same deadline as others."""

    async def crowd(at: Serving, count: int, sent: bytes) -> list[Client]:
        clients = [await at.connect() for _ in range(count)]
        for client in clients:
            await client.send(sent)
        return clients

    assert connection_limiter.HEAD_TIMEOUT_S == 10
    limits = ConnectionLimits(total=5, per_host=0, spare=5)
    async with serving(limits, certificates["first"].tls()) as at:
        clients = await crowd(at, 40, b"") + await crowd(at, 40, b"\x16\x03\x01")
        assert await ask(at, certificates["first"].trusted(), GET + b"\r\n") == 200
        assert at.limiter.num_open <= 10
        for client in clients:
            client.close()
        await at.until("nobody is connected", lambda: not at.limiter.num_open)
        monkeypatch.setattr(at.limiter.heads, "_timeout_s", 0.2)
        silent = await at.connect()
        assert await silent.is_closed()
        silent.close()


def test_files_that_cannot_be_used_are_named(certificates: dict[str, Certificate], tmp_path: Path) -> None:
    first, second = certificates["first"], certificates["second"]
    nothing = tmp_path / "nothing.pem"
    for config, message in (
        (Tls(str(nothing)), "--ssl-certfile .*nothing.pem, which must also contain the key: No such file"),
        (Tls(str(first.certfile)), "--ssl-certfile .*first.pem, which must also contain the key: "),
        (Tls(str(first.certfile), str(second.keyfile)), "--ssl-keyfile .*second.key: KEY_VALUES_MISMATCH"),
        (Tls(str(first.certfile), str(first.keyfile), str(nothing)), "--ssl-ca-certs .*nothing.pem: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(config)
    both = tmp_path / "both.pem"
    both.write_text(first.certfile.read_text() + first.keyfile.read_text())
    assert TlsFiles(Tls(str(both))).context.verify_mode is ssl.CERT_NONE


def test_up_asks_its_scheduler_over_tls() -> None:
    assert Launch(port=9000).url == "http://127.0.0.1:9000"
    launch = Launch(port=9000, arguments=["--ssl-certfile=c.pem", "--ssl-keyfile", "k.pem"])
    assert (launch.url, launch.admin_url) == ("https://127.0.0.1:9000", "https://127.0.0.1:9001")
    with pytest.raises(ConfigError, match="--ssl-cert-reqs 2: `up` has no client certificate"):
        _ = Launch(arguments=["--ssl-certfile=c.pem", "--ssl-cert-reqs", "2"]).url


def test_a_cluster_with_two_api_processes(
    certificates: dict[str, Certificate], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = certificates["first"]
    flags = [f"--ssl-certfile={first.certfile}", f"--ssl-keyfile={first.keyfile}", "--api-workers=2"]
    cluster = LiveCluster(tmp_path, model, arguments=[*FLAGS, *flags])
    cluster.client = httpx.Client(timeout=60, trust_env=False, verify=first.trusted())
    with cluster:
        for _ in range(4):
            with httpx.Client(verify=first.trusted(), trust_env=False, timeout=30) as client:
                body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
                assert client.post(f"{cluster.url}/v1/completions", json=body).status_code == 200
        asked = Admin(cluster.admin_url, env={"SSL_CERT_FILE": str(first.certfile)})
        assert asyncio.run(asked.ask("/instances")).status_code == 200
        with pytest.raises(PdClusterError, match="certificate"):
            asyncio.run(Admin(cluster.admin_url).ask("/instances"))
        with pytest.raises(PdClusterError, match="SSL_CERT_FILE can name a file"):
            chat(cluster.url, "", "hello", [], "", {"max_tokens": 2})
        monkeypatch.setenv("SSL_CERT_FILE", str(first.certfile))
        chat(cluster.url, "", "hello", [], "", {"max_tokens": 2})
        cluster.assert_home()
