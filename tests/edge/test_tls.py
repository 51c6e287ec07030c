"""TLS, by a router in a process of its own and clients that check its certificate."""

import asyncio
import ssl
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import trustme
from fastapi import FastAPI

from app.core.errors import ConfigError
from app.edge.tls import certificate_of
from app.http import server
from tests.door.conftest import until_serving, worker_here
from tests.door.test_answers import chat
from tests.e2e.engines import Process
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE


class Authority:
    """Issues certificates, which its clients trust."""

    def __init__(self):
        self._ca = trustme.CA()

    def issue(self, folder):
        """Paths of a certificate and its key, in place of those that were there."""
        issued = self._ca.issue_cert("127.0.0.1")
        paths = folder / "cert.pem", folder / "key.pem"
        paths[0].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        paths[1].write_bytes(issued.private_key_pem.bytes())
        return str(paths[0]), str(paths[1])

    @property
    def certificate(self):
        return self._ca.cert_pem.bytes()

    def client(self, url):
        context = ssl.create_default_context()
        self._ca.configure_trust(context)
        return httpx.AsyncClient(base_url=url, verify=context, timeout=60)


@contextmanager
def router(redis_url, cert, key):
    process = Process(
        "router",
        *(f"--redis-url={redis_url}", f"--namespace={NAMESPACE}", "--port=0"),
        *(f"--tls-cert={cert}", f"--tls-key={key}", "--redis-timeout-ms=5000"),
    )
    try:
        yield process
    finally:
        process.end()


async def test_a_new_certificate_breaks_off_no_stream_and_plain_http_is_not_spoken_beside_tls(
    one_redis_server, tmp_path
):
    old, new = Authority(), Authority()
    url = one_redis_server.url
    async with worker_here(url, "a", speedup=1):
        with router(url, *old.issue(tmp_path)) as process:
            assert process.url.startswith("https://")
            asked = chat("long", stream=True, max_tokens=200, ignore_eos=True)
            async with old.client(process.url) as client:
                await until_serving(client, 1)
                async with client.stream("POST", "/v1/chat/completions", json=asked) as answer:
                    pieces = answer.aiter_text()
                    text = await anext(pieces)
                    new.issue(tmp_path)

                    async def is_trusted(by):
                        try:
                            async with by.client(process.url) as fresh:
                                return (await fresh.get("/health")).is_success
                        except httpx.ConnectError:
                            return False

                    await eventually(lambda: is_trusted(new), bool)
                    assert not await is_trusted(old)
                    async with httpx.AsyncClient() as plain:
                        with pytest.raises(httpx.HTTPError):
                            await plain.get(process.url.replace("https", "http") + "/health")
                    text += "".join([piece async for piece in pieces])
            assert text.endswith("data: [DONE]\n\n")


def test_a_handshake_that_does_not_come_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.1)
    certificate = certificate_of(*Authority().issue(tmp_path))
    assert certificate is not None

    async def connect():
        with server.listen("127.0.0.1", 0) as listening:
            serving = asyncio.create_task(
                server.serve(FastAPI(), listening, tls=certificate.context)
            )
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            async with asyncio.timeout(30):
                rest = await reader.read()
            writer.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            return rest

    assert server.run(connect()) == b""


def test_a_certificate_that_cannot_be_used_is_refused_at_the_start_and_later_not_taken(tmp_path):
    cert, key = Authority().issue(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _, wrong_key = Authority().issue(other)
    encrypted = tmp_path / "encrypted.pem"
    encrypted.write_text(
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n"
        "DEK-Info: AES-128-CBC,00000000000000000000000000000000\n\nAAAA\n"
        "-----END RSA PRIVATE KEY-----\n"
    )
    assert certificate_of("", "") is None
    assert certificate_of(cert, key) is not None
    for given, said in (
        ((cert, ""), "tls_cert is set, and tls_key is not"),
        (("", key), "tls_key is set, and tls_cert is not"),
        ((cert, wrong_key), f"tls_key {wrong_key}: .*mismatch"),
        ((cert, str(tmp_path / "none")), "No such file"),
        ((cert, str(encrypted)), "encrypted"),
    ):
        with pytest.raises(ConfigError, match=said):
            certificate_of(*given)
    loaded = certificate_of(cert, key)
    assert loaded is not None
    for file, text in (
        (key, Path(wrong_key).read_text()),
        (key, encrypted.read_text()),
        (cert, Path(cert).read_text()[:-40]),
        (cert, ""),
    ):
        kept = Path(file).read_text()
        Path(file).write_text(text)
        with pytest.raises(ConfigError, match="tls_cert"):
            loaded.reload()
        Path(file).write_text(kept)
        loaded.reload()
