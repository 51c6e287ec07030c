"""The port from which workers fetch KV: what strangers may cost, and that they get nothing."""

import asyncio
import logging
import socket
from contextlib import AsyncExitStack, asynccontextmanager

import orjson
import pytest

from tests.attack import kv_port
from tests.attack.kv_port import KvPort
from tests.eventually import eventually
from tests.workers.kv.pairs import KIND, LEASE_S, WORD, answer_of, pair
from tests.workers.kv.words import block, chain, computed
from workers.kv.identity import IDENTITY_BYTES
from workers.kv.transfer import server, tcp
from workers.kv.transfer.tcp import MAX_BLOCKS, VERSION, proof_of, wanted_frame

LONG_S = 600.0
"""So that no deadline but the one that is tested ends anything."""
KEY = "inner"


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    monkeypatch.setattr(server, "ASKING_S", LONG_S)


@asynccontextmanager
async def connected(port, host="127.0.0.1"):
    """To `port`, from the address `host`."""
    _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
    try:
        yield writer
    finally:
        writer.close()


async def answered(workers, outcome, count=1):
    async def seen():
        return workers.link.answered[outcome]

    await eventually(seen, lambda number: number == count)


async def test_only_who_has_the_key_gets_blocks():
    async with pair(key=KEY) as workers:
        for wrong in ("", "outer", KEY + " ", KEY[:-1]):
            assert (await workers.fetch(key=wrong)).num_good == 0
        assert len(workers.kept.tables) == 1, "nobody lets go of what others are to fetch"
        assert (await workers.fetch(key=KEY)).num_good == 5
        assert workers.link.answered == {"refused": 4, "sent": 1}


async def test_who_is_refused_hears_why_however_much_it_has_sent():
    async with pair(key=KEY) as workers:
        for num_blocks in (1, 1000, 100_000):
            asked = wanted_frame(workers.transfer_id, [block("A")] * num_blocks, KIND, "outer")
            assert b"proof" in await answer_of(
                workers.port, asked[4:], len(asked) - 4 - IDENTITY_BYTES * num_blocks
            )
        await answered(workers, "refused", 3)


async def test_without_the_key_nobody_declines_for_others():
    async with pair(key=KEY) as workers:
        nothing = wanted_frame(workers.transfer_id, (), {}, "")
        await answer_of(workers.port, nothing[4:])
        assert len(workers.kept.tables) == 1


async def test_a_proof_is_of_use_for_one_id_alone():
    async with pair(key=KEY) as workers:
        asked = {
            "version": VERSION,
            "transfer_id": workers.transfer_id,
            "num_blocks": 1,
            "kind": KIND,
            "proof": proof_of(KEY, "another").decode(),
        }
        assert b"proof" in await answer_of(workers.port, orjson.dumps(asked))
        assert len(workers.kept.tables) == 1


async def test_a_target_with_a_key_fetches_from_a_source_that_needs_none():
    async with pair() as workers:
        assert (await workers.fetch(key=KEY)).num_good == 5


@pytest.mark.parametrize(
    "begun", [b"", b"\x10\0", b"\x10\0\0\0{", wanted_frame("x", (), {}, "")[:-1]]
)
async def test_connections_that_never_ask_keep_nobody_out(begun):
    async with pair() as workers, AsyncExitStack() as stack:
        for _ in range(2 * server.MAX_ASKING):
            silent = await stack.enter_async_context(connected(workers.port))
            silent.write(begun)
        await answered(workers, "crowded", server.MAX_ASKING)
        assert (await workers.fetch()).num_good == 5


async def test_other_work_goes_on_while_many_connect_at_once():
    async with pair() as workers, AsyncExitStack() as stack:
        num_turns = 0

        async def work():
            nonlocal num_turns
            while True:
                await asyncio.sleep(0)
                num_turns += 1

        working = asyncio.create_task(work())
        stack.callback(working.cancel)
        for _ in range(100):
            raw = socket.create_connection(("127.0.0.1", workers.port), timeout=10)
            stack.callback(raw.close)
        await answered(workers, "crowded", 100 - server.MAX_ASKING)
        assert num_turns >= 100


async def test_a_peer_with_many_connections_takes_none_from_another():
    async with pair() as workers, AsyncExitStack() as stack:
        first = await stack.enter_async_context(connected(workers.port, "127.0.0.2"))
        for _ in range(2 * server.MAX_ASKING):
            await stack.enter_async_context(connected(workers.port))
        await answered(workers, "crowded", server.MAX_ASKING + 1)
        first.write(wanted_frame(workers.transfer_id, (), {}, ""))
        await answered(workers, "declined")


async def says_nothing(*_):
    await asyncio.Event().wait()


async def sends_a_byte_now_and_then(writer, _):
    writer.write((4096).to_bytes(4, "little"))
    while True:
        writer.write(b"\1")
        await asyncio.sleep(0.02)


async def sends_a_giant_length(writer, _):
    writer.write(b"\xff" * 4 + b"x" * 10_000)
    await asyncio.Event().wait()


async def never_reads(writer, workers):
    held = workers.kept.keep(computed(workers.manager, WORD), LEASE_S)
    writer.write(wanted_frame(held, chain(WORD), KIND, ""))
    await asyncio.Event().wait()


async def connects_a_thousand_times(_, workers):
    async with AsyncExitStack() as stack:
        for _ in range(1000):
            await stack.enter_async_context(connected(workers.port))
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("abuse", "outcome", "count"),
    [
        (says_nothing, "stalled", 1),
        (sends_a_byte_now_and_then, "stalled", 1),
        (sends_a_giant_length, "refused", 1),
        (never_reads, "stalled", 1),
        (connects_a_thousand_times, "crowded", 1001 - server.MAX_ASKING),
    ],
)
async def test_each_abuse_is_ended_and_the_worker_serves_on(abuse, outcome, count, monkeypatch):
    if outcome == "stalled":
        monkeypatch.setattr(server, "ASKING_S", 0.2)
        monkeypatch.setattr(tcp, "STALL_S", 0.2)
    async with pair() as workers:
        sock = socket.socket()
        # Little is on its way before somebody has to read.
        workers.link.listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", workers.port))
        _, writer = await asyncio.open_connection(sock=sock, limit=1024)
        abusing = asyncio.create_task(abuse(writer, workers))
        await answered(workers, outcome, count)
        assert (await workers.fetch()).num_good == 5
        abusing.cancel()
        writer.close()
        await asyncio.wait([abusing])


async def test_no_blocks_are_read_of_who_names_nothing_that_is_kept():
    async with pair() as workers, connected(workers.port) as writer:
        # None of the blocks follow: an answer comes without them.
        writer.write(wanted_frame("another", [block("A")] * MAX_BLOCKS, KIND, "")[:200])
        await answered(workers, "refused")


async def test_a_block_that_is_asked_for_twice_travels_once():
    async with pair() as workers, connected(workers.port) as writer:
        blocks = [*chain(WORD)[:2], chain(WORD)[1], *chain(WORD)[2:]]
        writer.write(wanted_frame(workers.transfer_id, blocks, KIND, ""))
        await answered(workers, "sent")


async def test_more_blocks_than_a_prompt_has_are_refused():
    async with pair() as workers:
        asked = {
            "version": VERSION,
            "transfer_id": "x",
            "num_blocks": 2**63,
            "kind": {},
            "proof": "",
        }
        assert b"asks for no blocks" in await answer_of(workers.port, orjson.dumps(asked))


async def test_a_kind_that_names_more_is_another():
    async with pair() as workers:
        assert (await workers.fetch(kind=KIND | {"more": "x"})).num_good == 0


def lines(caplog):
    return (r.getMessage() for r in caplog.records if r.name.startswith("workers.kv.transfer"))


async def test_what_strangers_send_takes_one_short_line(caplog):
    caplog.set_level(logging.INFO)
    async with pair() as workers:
        for number in range(30):
            kind = {"model": "\x1b[2J\n" * 300 + str(number)}
            asked = {"version": VERSION, "transfer_id": "x" * 64, "num_blocks": 1, "kind": kind}
            await answer_of(workers.port, orjson.dumps(asked | {"proof": ""}))
        await answered(workers, "refused", 30)
        [line] = lines(caplog)
        assert len(line) < 400


async def test_a_surprise_ends_one_connection_alone(caplog, monkeypatch):
    async def broken(*_):
        raise ZeroDivisionError

    async with pair() as workers:
        with monkeypatch.context() as patched:
            patched.setattr(server, "read_asked", broken)
            await answer_of(workers.port, b"{}")
        await answered(workers, "failed")
        assert (await workers.fetch()).num_good == 5


def test_a_million_strangers_are_remembered_as_a_few():
    complaints = server.Complaints(logging.getLogger("nobody"))
    for number in range(100_000):
        complaints.say(f"2001:db8::{number:x}", "refused", ValueError("x"))
    assert len(complaints._limits._limits) <= 300


@pytest.mark.slow
async def test_the_attack_program_finds_nothing(monkeypatch):
    monkeypatch.setattr(server, "ASKING_S", 2.0)
    async with pair(key=KEY) as workers:
        for key in ("", KEY):
            attack = KvPort("127.0.0.1", workers.port, key)
            await attack.attack(400)
            assert attack.problems == []
        assert (await workers.fetch(key=KEY)).num_good == 5


async def test_the_attack_program_sees_a_port_that_keeps_workers_out(monkeypatch):
    monkeypatch.setattr(kv_port, "PROBE_TIMEOUT_S", 0.1)
    async with pair() as workers:
        attack = KvPort("127.0.0.1", workers.port)
        monkeypatch.setattr(server, "MAX_ASKING", 0)
        async with attack._answering():
            await eventually(lambda: _length(attack.problems), bool)


async def _length(problems):
    return len(problems)
