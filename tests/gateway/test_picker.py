"""What a picker tells a gateway, message by message."""

import asyncio

import grpc
import orjson
import pytest
from grpc_health.v1 import health_pb2

from app.core.errors import ConfigError
from app.gateway import ext_proc, picker, processor
from app.gateway.gateway_request import FIRST_BYTES
from app.gateway.grpc_server import MAX_BYTES
from app.gateway.messages import (
    CHUNK_BYTES,
    FULL_DUPLEX_STREAMED,
    MAX_HEAD_BYTES,
    NONE,
    SUBSET,
    TEST_SELECTION,
)
from app.gateway.processor import LIVENESS, READINESS, SERVICE
from app.http import body
from app.http.protocol import HEAD_TIMEOUT_S
from tests.door.conftest import registered, worker_here
from tests.eventually import eventually
from tests.gateway.conftest import DONE, EVENTS, USAGE, fleet, picking

ASKS = {"model": "m", "prompt": [*range(1, 13)], "stream": True}
FIRST, SECOND = "10.0.0.1:80", "10.0.0.2:80"


async def test_a_request_goes_to_one_worker_with_the_other_to_fall_back_to(gateway):
    asked, told = await gateway.asks(ASKS)
    assert {*told.endpoints.split(",")} == {FIRST, SECOND}
    assert told.metadata == told.endpoints
    first = "w1" if told.endpoints.startswith(FIRST) else "w2"
    await gateway.until_reserved(**{first: 1})
    await asked.answer_begins()
    await asked.answers(*EVENTS, DONE)
    await asked.ends()
    await gateway.until_reserved()


async def test_the_body_goes_on_and_its_length_is_right(gateway):
    body = orjson.dumps(ASKS | {"user": "x" * 150_000})
    _, told = await gateway.asks(body, pieces=7)
    # Usage is asked for, as it is taken out again of what passes.
    assert told.fields == orjson.loads(body) | {"stream_options": {"include_usage": True}}
    assert told.headers["content-length"] == b"%d" % len(told.body)
    assert told.num_pieces == -(-len(told.body) // CHUNK_BYTES) == 3


@pytest.mark.fleet(1)
async def test_trailers_of_a_request_go_on_behind_its_body(gateway):
    asked = gateway.call()
    await asked.headers("/v1/completions", mode=NONE, about={}, meta=None)
    await asked.body(orjson.dumps(ASKS), ends=False)
    trailers = ext_proc.ProcessingRequest()
    trailers.request_trailers.SetInParent()
    await asked.call.write(trailers)
    told = await asked.told()
    assert (told.fields, told.num_pieces, told.has_trailers) == (ASKS, 1, True)


@pytest.mark.parametrize("send_ids", [True, False])
async def test_an_engine_gets_the_ids_of_its_prompt_only_where_that_is_asked_for(
    send_ids, one_redis_server
):
    url, chat = one_redis_server.url, "/v1/chat/completions"
    asks = {"messages": [{"role": "user", "content": "hello"}]}
    async with worker_here(url, "a"), picking(url, send_ids=send_ids) as gateway:
        await gateway.until_serving(1)
        _, told = await gateway.asks(asks, chat)
        assert (b'"prompt_token_ids"' in told.body) is send_ids
        assert told.headers["content-length"] == b"%d" % len(told.body)


async def test_usage_that_nobody_asked_for_goes_no_further(gateway):
    asked, _ = await gateway.asks(ASKS)
    await asked.answer_begins()
    assert await asked.answers(*EVENTS, USAGE, DONE) == [*EVENTS, b"", DONE]


async def test_a_client_is_told_of_an_answer_that_its_engine_aborts(gateway):
    asked, _ = await gateway.asks(ASKS)
    await asked.answer_begins()
    aborts = EVENTS[1].replace(b'"stop"', b'"abort"')
    passed = await asked.answers(EVENTS[0], aborts, DONE)
    assert passed[0] == EVENTS[0]
    assert b"abort" not in b"".join(passed).replace(b"ended by aborted", b"")
    assert b'"error"' in passed[-1]


@pytest.mark.fleet(1)
async def test_an_answer_that_is_no_stream_goes_on_in_as_few_messages_as_it_fits(gateway):
    body = orjson.dumps({"choices": [{"text": "a" * 150_000}]})
    asked, _ = await gateway.asks(ASKS | {"stream": False})
    await asked.answer_begins(kind="application/json")
    pieces = [body[at : at + 10_000] for at in range(0, len(body), 10_000)]
    passed = await asked.told_of_answer(*pieces, b"")
    assert (b"".join(passed), len(passed)) == (body, 3)
    await asked.ends()
    await gateway.until_reserved()


@pytest.mark.fleet(1)
async def test_trailers_of_an_answer_go_on_behind_it(gateway):
    asked, _ = await gateway.asks(ASKS | {"stream": False})
    await asked.answer_begins(kind="application/json")
    await asked.says_of_answer(b'{"choices": []}', ends=False)
    trailers = ext_proc.ProcessingRequest()
    trailers.response_trailers.SetInParent()
    await asked.call.write(trailers)
    said = [await asked.call.read() for _ in range(2)]
    piece = said[0].response_body.response.body_mutation.streamed_response
    assert (piece.body, piece.end_of_stream) == (b'{"choices": []}', False)
    assert said[1].HasField("response_trailers")
    await asked.ends()
    await gateway.until_reserved()


async def test_usage_is_not_asked_for_where_answers_do_not_pass(gateway):
    asked, told = await gateway.asks(ASKS, mode=NONE)
    assert told.fields == ASKS
    await asked.answer_begins()
    await asked.ends()
    await gateway.until_reserved()


async def test_the_first_token_frees_what_was_reserved_for_the_prompt(redis, one_redis_server):
    async def queued(gateway):
        workers = (await gateway.http.get("/v1/workers")).json()["workers"]
        return sum(each["prefill_tokens"] for each in workers)

    async with fleet(redis, one_redis_server.url) as gateway:
        asked, _ = await gateway.asks(ASKS)
        await eventually(lambda: queued(gateway), lambda tokens: tokens == 12)
        await asked.answer_begins()
        await asked.answers(EVENTS[0], ends=False)
        await eventually(lambda: queued(gateway), lambda tokens: tokens == 0)
        assert sum((await gateway.reserved()).values()) == 1


async def test_a_gateway_that_hangs_up_releases(gateway):
    before, _ = await gateway.asks(ASKS)
    amid, _ = await gateway.asks(ASKS)
    await amid.answer_begins()
    await amid.answers(EVENTS[0], ends=False)
    await eventually(gateway.reserved, lambda found: sum(found.values()) == 2)
    before.call.cancel()
    await eventually(gateway.reserved, lambda found: sum(found.values()) == 1)
    await amid.ends()
    await gateway.until_reserved()


async def test_a_gateway_that_dies_releases(gateway):
    await gateway.asks(ASKS)
    await gateway.asks(ASKS)
    await eventually(gateway.reserved, lambda found: sum(found.values()) == 2)
    await gateway.channel.close()
    await gateway.until_reserved()


@pytest.mark.fleet(1, max_requests=1, wait_queue=8, wait_timeout_s=600.0)
async def test_a_request_that_waits_is_given_up_when_its_gateway_leaves(gateway):
    await gateway.asks(ASKS)
    asked = gateway.call()
    await asked.headers("/v1/completions", mode=NONE, about={}, meta=None)
    await asked.body(orjson.dumps(ASKS))
    await eventually(gateway.waiting, lambda num: num == 1)
    await asked.call.done_writing()
    await eventually(gateway.waiting, lambda num: num == 0)


async def test_a_gateway_confines_a_request_to_some_endpoints(gateway):
    for allowed in (SECOND, [SECOND, "10.9.9.9:80"]):
        _, told = await gateway.asks(ASKS, meta={SUBSET: allowed})
        assert told.endpoints == SECOND
    _, told = await gateway.asks(ASKS, meta={SUBSET: "10.9.9.9:80"})
    assert (told.status, told.fields["error"]["code"]) == (503, "no_workers")


@pytest.mark.parametrize("is_obeyed", [True, False])
async def test_a_test_of_gateways_chooses_only_where_it_is_allowed_to(
    is_obeyed, redis, one_redis_server
):
    about = {TEST_SELECTION.decode(): f"{SECOND},{FIRST}"}
    async with fleet(redis, one_redis_server.url, obey_test_header=is_obeyed) as gateway:
        told = [(await gateway.asks(ASKS, about=about))[1].endpoints for _ in range(6)]
        assert ({*told} == {f"{SECOND},{FIRST}"}) is is_obeyed


async def test_a_reservation_moves_to_the_worker_that_answers(gateway):
    asked, told = await gateway.asks(ASKS)
    first, second = told.endpoints.split(",")
    names = {FIRST: "w1", SECOND: "w2"}
    await gateway.until_reserved(**{names[first]: 1})
    await asked.answer_begins(served=second)
    await gateway.until_reserved(**{names[second]: 1})
    await asked.answers(*EVENTS, DONE)
    await asked.ends()
    await gateway.until_reserved()


async def test_one_slot_is_promised_once(redis, one_redis_server):
    url = one_redis_server.url
    async with fleet(redis, url, 1, max_requests=1) as gateway, picking(url) as other:
        await other.until_serving(1)
        kept = [await each.asks(ASKS) for _ in range(3) for each in (gateway, other)]
        told = [each for _, each in kept]
        assert sorted(each.status for each in told) == [0, 429, 429, 429, 429, 429]
        refused = next(each for each in told if each.status)
        assert refused.fields["error"]["code"] == "all_workers_busy"
        assert refused.headers["retry-after"].isdigit()


@pytest.mark.fleet(1)
async def test_no_worker_is_503(gateway):
    _, told = await gateway.asks(ASKS | {"model": "other"})
    assert (told.status, told.fields["error"]["code"]) == (404, "model_not_found")
    _, told = await gateway.asks(b'{"mod')
    assert told.status == 400
    _, told = await gateway.asks({}, "/console/")
    assert told.status == 404


@pytest.mark.fleet(1, max_request_bytes=1000)
async def test_a_body_that_is_too_large_is_refused_as_at_the_door(gateway):
    _, told = await gateway.asks(ASKS | {"user": "x" * 2000}, pieces=3)
    assert (told.status, told.fields["error"]["code"]) == (413, "body_too_large")


@pytest.mark.fleet(1, api_key="secret", worker_key="theirs")
async def test_keys_are_checked_and_stay_here(gateway):
    _, told = await gateway.asks(ASKS)
    assert told.status == 401
    about = {"authorization": "Bearer secret", "x-vllm-priority": "9", "cookie": "a=b"}
    _, told = await gateway.asks(ASKS, about=about)
    assert told.headers["authorization"] == b"Bearer theirs"
    assert {"x-vllm-priority", "cookie"} <= {*told.removed}
    assert "authorization" not in told.removed


@pytest.mark.fleet(1)
async def test_without_a_key_for_workers_a_clients_key_goes_no_further(gateway):
    _, told = await gateway.asks(ASKS, about={"authorization": "Bearer mine"})
    assert "authorization" in told.removed


@pytest.mark.fleet(1)
async def test_an_engine_that_fails_is_told_of(gateway):
    asked, _ = await gateway.asks(ASKS)
    said = b'{"error": {"message": "broken", "type": "server_error"}}'
    mutation, piece = await asked.answers_at_once(500, said)
    headers = {each.header.key: each.header.raw_value for each in mutation.set_headers}
    assert headers[":status"] == b"500"
    assert orjson.loads(piece)["error"]["message"] == "broken"
    await asked.ends()
    text = (await gateway.http.get("/metrics")).text
    assert 'outcome="engine_error"' in text


@pytest.mark.parametrize("goes_on", ["with trailers", "for long", "without an end"])
@pytest.mark.fleet(1)
async def test_a_refusal_is_told_though_more_comes_behind_it(gateway, goes_on, monkeypatch):
    if goes_on == "without an end":
        monkeypatch.setattr(picker, "REFUSED_WITHIN_S", 0.1)
    asked, _ = await gateway.asks(ASKS)
    await asked.begins(400, "application/json")
    said = b'{"error": {"message": "no such thing", "type": "invalid"}}'
    if goes_on == "for long":
        said += b" " * FIRST_BYTES
    await asked.says_of_answer(said, ends=False)
    if goes_on == "with trailers":
        trailers = ext_proc.ProcessingRequest()
        trailers.response_trailers.SetInParent()
        await asked.call.write(trailers)
    told = await asked.told()
    assert told.status == 400
    assert told.fields["error"]["message"] == "no such thing"
    assert told.headers["retry-after"] == b"7"
    await gateway.until_reserved()


@pytest.mark.fleet(1, answer_timeout_s=0.5)
async def test_an_engine_that_says_nothing_is_not_waited_for_for_ever(gateway):
    asked, _ = await gateway.asks(ASKS)
    told = await asked.told()
    assert (told.status, told.fields["error"]["code"]) == (504, "answer_timeout")
    await gateway.until_reserved()


@pytest.mark.fleet(1)
async def test_a_path_may_spell_characters_as_clients_do(gateway):
    _, told = await gateway.asks({}, "/v1/models/%6d?a=%20", method="GET")
    assert (told.status, told.fields["id"]) == (200, "m")


async def test_its_health_says_what_is_served(redis, one_redis_server):
    async with picking(one_redis_server.url) as gateway:
        health = gateway.health
        serving = health_pb2.HealthCheckResponse.SERVING
        for name in ("", LIVENESS, SERVICE):
            assert await health(name) == serving
        assert await health(READINESS) != serving
        await registered(redis, "w1", f"http://{FIRST}")
        await eventually(lambda: health(READINESS), lambda found: found == serving)


async def test_a_filter_that_holds_bodies_back_is_told_what_is_needed(one_redis_server):
    async with picking(one_redis_server.url) as gateway:
        asked = gateway.call()
        await asked.headers("/v1/completions", mode=2, about={}, meta=None)
        with pytest.raises(grpc.aio.AioRpcError, match=r"response_body_mode: needs NONE.*BUFFERED"):
            await asked.call.read()


async def test_a_port_that_is_taken_is_named(one_redis_server):
    async with picking(one_redis_server.url) as gateway:
        taken = gateway.processor.port
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{taken}: .*grpc_port"):
            async with picking(one_redis_server.url, grpc_port=taken):
                pass


@pytest.mark.fleet(1, max_requests=1, wait_queue=8, wait_timeout_s=600.0)
async def test_a_worker_that_comes_while_a_request_waits_gets_it(gateway, redis):
    await gateway.asks(ASKS)
    asking = asyncio.create_task(gateway.asks(ASKS))
    await eventually(gateway.waiting, lambda num: num == 1)
    await registered(redis, "w2", f"http://{SECOND}")
    _, told = await asking
    assert told.endpoints.split(",")[0] == SECOND


@pytest.mark.fleet(1, max_requests=1, wait_queue=8, wait_timeout_s=600.0)
async def test_a_worker_that_comes_meanwhile_gets_no_request_that_is_confined(gateway, redis):
    first, _ = await gateway.asks(ASKS)
    asking = asyncio.create_task(gateway.asks(ASKS, meta={SUBSET: [FIRST]}))
    await eventually(gateway.waiting, lambda num: num == 1)
    await registered(redis, "w2", f"http://{SECOND}")
    await gateway.until_serving(2)
    await asyncio.sleep(0.5)
    assert not asking.done()
    first.call.cancel()
    _, told = await asking
    assert told.endpoints == FIRST
    await gateway.until_reserved(w1=1)


async def test_an_answer_does_not_wait_for_a_slot_of_the_worker_it_comes_from(
    redis, one_redis_server, caplog
):
    options = {"max_requests": 1, "wait_queue": 8, "wait_timeout_s": 600.0}
    async with fleet(redis, one_redis_server.url, **options) as gateway:
        await gateway.asks(ASKS, meta={SUBSET: [FIRST]})
        asked, told = await gateway.asks(ASKS)
        assert told.endpoints.split(",")[0] == SECOND
        async with asyncio.timeout(10):
            said = b'{"error": {"message": "broken"}}'
            await asked.answers_at_once(500, said, served=FIRST)
        await asked.ends()
        await gateway.until_reserved(w1=1)
    assert not [each for each in caplog.records if each.exc_info]


@pytest.mark.parametrize("hint", [[], "", [80, None]], ids=str)
async def test_a_gateway_that_confines_a_request_to_nothing_gets_no_worker(gateway, hint):
    _, told = await gateway.asks(ASKS, meta={SUBSET: hint})
    assert (told.status, told.fields["error"]["code"]) == (503, "no_workers")


def silent(gateway):
    """A call whose messages are bytes as they are."""
    return gateway.channel.stream_stream(f"/{SERVICE}/Process")()


async def code_of(call, *said):
    """How it ends once that has been said."""
    for one in said:
        await call.write(one)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    return ended.value.code()


async def test_what_is_no_message_or_has_too_many_headers_is_refused_without_a_traceback(
    redis, one_redis_server, caplog
):
    many = ext_proc.ProcessingRequest()
    for number in range(MAX_HEAD_BYTES // 8):
        many.request_headers.headers.headers.add(key="x", raw_value=b"%d" % number)
    late = ext_proc.ProcessingRequest()
    late.request_body.body = b"{"
    async with fleet(redis, one_redis_server.url) as gateway:
        for said in (b"\xff\xff", late.SerializeToString()):
            code = await code_of(silent(gateway), said)
            assert code == grpc.StatusCode.INVALID_ARGUMENT
        too_long = b"\x22" + b"\x00" * (MAX_BYTES + 1)
        for said in (many.SerializeToString(), too_long):
            code = await code_of(silent(gateway), said)
            assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        _, told = await gateway.asks(ASKS)
        assert told.endpoints
    assert not [record for record in caplog.records if record.exc_info]


async def test_calls_that_say_nothing_make_room_and_end_in_time(gateway, monkeypatch):
    monkeypatch.setattr(processor, "MAX_SILENT", 4)
    calls = [asyncio.create_task(code_of(silent(gateway))) for _ in range(6)]

    async def num_ended():
        return sum(call.done() for call in calls)

    await eventually(num_ended, lambda number: number == 2, within_s=HEAD_TIMEOUT_S / 2)
    _, told = await gateway.asks(ASKS)
    assert told.endpoints
    assert await num_ended() == 3
    codes = await asyncio.wait_for(asyncio.gather(*calls), 2 * HEAD_TIMEOUT_S)
    assert set(codes) == {grpc.StatusCode.DEADLINE_EXCEEDED}


async def test_a_body_that_never_comes_is_not_waited_for_for_ever(gateway, monkeypatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.5)
    asked = gateway.call()
    await asked.headers("/v1/completions", mode=FULL_DUPLEX_STREAMED, about={}, meta=None)
    async with asyncio.timeout(10):
        assert (await asked.told()).status == 408
