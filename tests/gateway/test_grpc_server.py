"""What a gateway may do to the server that it asks, and what gRPC asks of that."""

import asyncio
import logging
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.settings import SettingCodes, Settings

from app.gateway import grpc_server
from app.gateway.grpc_server import MAX_BYTES, CallEndedError, GrpcServer, Status
from app.gateway.messages import MAX_HEAD_BYTES
from app.http.protocol import SeldomWarning
from app.http.server import listen
from tests.door.conftest import port_of
from tests.edge.test_tls import Authority
from tests.eventually import eventually
from tests.gateway.conftest import picking

ECHO, FAIL = "/s/Echo", "/s/Fail"


async def echo(call):
    while (message := await call.read()) is not None:
        await call.write(message)


async def fail(call):
    raise CallEndedError(Status.INVALID_ARGUMENT, "50 % of Ü, no more")


@asynccontextmanager
async def serving():
    """A server of these, and its port."""
    listening = listen("127.0.0.1", 0)
    methods = {ECHO.encode(): echo, FAIL.encode(): fail}
    server = GrpcServer(listening, methods)
    try:
        await server.start(None)
        yield server, port_of(listening)
    finally:
        await server.stop(0)


def stream(channel, path, **options):
    return channel.stream_stream(path)(**options)


async def ended(call):
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    return error.value.code(), error.value.details()


class Raw:
    """A client that speaks HTTP/2 and no gRPC, so that it can do what no library does."""

    def __init__(self, reader, writer, settings):
        self.reader, self.writer = reader, writer
        self.h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self.h2.local_settings = Settings(initial_values=settings)
        self.events = []

    @classmethod
    @asynccontextmanager
    async def open(cls, port, settings=None):
        client = cls(*await asyncio.open_connection("127.0.0.1", port), settings)
        client.h2.initiate_connection()
        client.flush()
        yield client
        client.writer.transport.abort()

    def flush(self):
        self.writer.write(self.h2.data_to_send())

    def begin(self, path, *messages, stream=1, ends=False):
        names = {":method": "POST", ":path": path, ":scheme": "http", ":authority": "a"}
        self.h2.send_headers(stream, list(names.items()))
        for message in messages:
            self.h2.send_data(stream, framed(message))
        if ends:
            self.h2.end_stream(stream)
        self.flush()

    async def until(self, kind):
        """Returns the first event of this kind, or None once the server has hung up."""
        while not (found := [each for each in self.events if isinstance(each, kind)]):
            data = await asyncio.wait_for(self.reader.read(65_536), 30)
            if not data:
                return None
            self.events += self.h2.receive_data(data)
            self.flush()
        return found[0]


def framed(message, flag=b"\0"):
    return flag + len(message).to_bytes(4, "big") + message


async def test_messages_of_any_size_go_there_and_back():
    async with serving() as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = stream(channel, ECHO)
        for size in (0, 1, 65_530, 200_000, MAX_BYTES):
            await call.write(b"x" * size)
            assert len(await call.read()) == size
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() == grpc.StatusCode.OK


async def test_many_messages_wait_until_they_are_read_and_none_is_lost():
    async with serving() as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = stream(channel, ECHO)
        writing = asyncio.create_task(written(call, 300))
        assert [int((await call.read())[:8]) for _ in range(300)] == [*range(300)]
        await writing


async def written(call, number):
    for n in range(number):
        await call.write(b"%08d" % n + b"x" * 10_000)
    await call.done_writing()


@pytest.mark.parametrize(
    ("path", "code", "details"),
    [
        (FAIL, grpc.StatusCode.INVALID_ARGUMENT, "50 % of Ü, no more"),
        ("/s/Other", grpc.StatusCode.UNIMPLEMENTED, "no such method"),
    ],
)
async def test_a_call_ends_with_its_status_and_words(path, code, details):
    async with serving() as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        assert await ended(stream(channel, path)) == (code, details)


async def test_compressed_messages_are_refused():
    async with serving() as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = stream(channel, ECHO, compression=grpc.Compression.Gzip)
        await call.write(b"x" * 1000)
        assert await ended(call) == (grpc.StatusCode.UNIMPLEMENTED, "compressed messages")


async def test_a_call_that_its_peer_ends_is_cancelled():
    async with serving() as (server, port), Raw.open(port) as client:
        client.begin(ECHO, b"a")
        await client.until(events.DataReceived)
        (connection,) = server.connections
        (call,) = connection.calls.values()
        client.h2.reset_stream(1)
        client.flush()
        await eventually(lambda: done(call), bool)
        assert (call.task.cancelled(), connection.calls) == (True, {})


async def done(call):
    return call.task.done()


async def test_a_peer_that_takes_nothing_is_not_sent_more_than_it_has_room_for(monkeypatch):
    monkeypatch.setattr(grpc_server, "STALLED_S", 0.5)
    small = {SettingCodes.INITIAL_WINDOW_SIZE: 10}
    async with serving() as (server, port), Raw.open(port, small) as client:
        client.begin(ECHO, b"x" * 1000)
        assert len((await client.until(events.DataReceived)).data) == 10
        (connection,) = server.connections
        (call,) = connection.calls.values()
        await eventually(lambda: done(call), bool)
        assert sum(len(each.data) for each in client.events if hasattr(each, "data")) == 10


async def test_a_peer_that_leaves_the_protocol_is_hung_up_on():
    async with serving() as (server, port), Raw.open(port) as client:
        client.begin(ECHO, b"a")
        await client.until(events.DataReceived)
        (connection,) = server.connections
        (call,) = connection.calls.values()
        client.writer.write(b"\xff" * 64)
        assert await client.until(events.PingAckReceived) is None
        await eventually(lambda: done(call), bool)


async def test_who_answers_no_ping_is_hung_up_on(monkeypatch):
    monkeypatch.setattr(grpc_server, "PING_EVERY_S", 0.2)
    async with serving() as (server, port):
        for hello in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(hello)
            async with asyncio.timeout(30):
                while await reader.read(65_536):
                    pass
            writer.close()
        assert not server.connections


async def test_a_call_goes_on_while_its_server_stops_and_no_other_begins():
    async with serving() as (server, port), Raw.open(port) as client:
        client.begin(ECHO, b"a")
        await client.until(events.DataReceived)
        stopping = asyncio.create_task(server.stop(30))
        assert (await client.until(events.ConnectionTerminated)).error_code == 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        assert not stopping.done()
        client.writer.close()
        await asyncio.wait_for(stopping, 10)


async def test_no_more_calls_than_there_may_be():
    async with serving() as (server, port), Raw.open(port) as first, Raw.open(port) as second:
        server.max_calls = 1
        first.begin(ECHO, b"a")
        await first.until(events.DataReceived)
        second.begin(ECHO)
        headers = dict((await second.until(events.ResponseReceived)).headers)
        assert headers["grpc-status"] == str(int(Status.RESOURCE_EXHAUSTED))


async def test_a_picker_speaks_tls_where_its_certificate_says_so(one_redis_server, tmp_path):
    authority = Authority()
    cert, key = authority.issue(tmp_path)
    async with picking(one_redis_server.url, tls_cert=cert, tls_key=key) as gateway:
        where = f"127.0.0.1:{gateway.processor.port}"
        trusted = grpc.ssl_channel_credentials(authority.certificate)
        async with grpc.aio.secure_channel(where, trusted) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            told = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"))
            assert told.status == health_pb2.HealthCheckResponse.SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Check(health_pb2.HealthCheckRequest(service="other"))
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_call_without_a_path_ends_alone():
    async with serving() as (_, port), Raw.open(port) as client:
        client.begin(ECHO, b"a")
        await client.until(events.DataReceived)
        client.h2.config.validate_outbound_headers = False
        client.h2.send_headers(3, [(":method", "POST"), (":scheme", "http")], end_stream=True)
        client.flush()
        client.events.clear()
        refused = await client.until(events.ResponseReceived)
        assert dict(refused.headers)["grpc-status"] == str(int(Status.UNIMPLEMENTED))
        client.h2.send_data(1, framed(b"b"))
        client.flush()
        assert await client.until(events.DataReceived)


@pytest.mark.parametrize(("before", "most"), [(0, MAX_HEAD_BYTES), (1, MAX_BYTES)])
async def test_the_first_message_of_a_call_is_no_body(before, most):
    async with serving() as (_, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for size, code in ((most, "OK"), (most + 1, "RESOURCE_EXHAUSTED")):
            call = stream(channel, ECHO)
            for _ in range(before):
                await call.write(b"x")
                assert await call.read() == b"x"
            await call.write(b"x" * size)
            await call.done_writing()
            if code == "OK":
                assert len(await call.read()) == size
            assert (await call.code()).name == code


async def test_past_the_limit_the_oldest_connection_without_a_call_makes_room():
    async with serving() as (server, port):
        server.max_connections = 2
        async with Raw.open(port) as busy, Raw.open(port) as idle:
            busy.begin(ECHO, b"x")
            assert await busy.until(events.DataReceived)
            assert await idle.until(events.RemoteSettingsChanged)
            async with Raw.open(port) as newest:
                newest.begin(ECHO, b"y")
                assert await newest.until(events.DataReceived)
                assert await idle.until(events.ConnectionTerminated) is None
                busy.events.clear()
                busy.h2.send_data(1, framed(b"z"))
                busy.flush()
                assert await busy.until(events.DataReceived)


async def test_what_speaks_no_http_2_is_seldom_logged(caplog, monkeypatch):
    monkeypatch.setattr(grpc_server, "log", SeldomWarning(logging.getLogger("gateway")))
    async with serving() as (_, port):
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            await asyncio.wait_for(reader.read(), 30)
            writer.close()
            await writer.wait_closed()
    assert 1 <= caplog.text.count("does not speak HTTP/2") < 20
