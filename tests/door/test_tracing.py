"""Traces of requests through the door, and the trace context that workers get."""

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from app.core.errors import ConfigError
from app.door.told.tracing import Tracing, provider_named, provider_of
from tests.door.conftest import completing, replica, until_serving

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}
ASKED = {"model": "m", "prompt": [1, 2, 3, 4, 5]}


class Engine:
    """Answers completions. refusals: statuses of its first answers."""

    def __init__(self, *refusals):
        self._refusals = list(refusals)
        self.headers = []

    async def complete(self, request):
        body = await request.json()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self._refusals:
            return web.json_response({"error": "x"}, status=self._refusals.pop())
        if body.get("stream"):
            text = 'data: {"choices":[{"text":"x"}]}\n\ndata: [DONE]\n\n'
            return web.Response(text=text, content_type="text/event-stream")
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        usage |= {"prompt_tokens_details": {"cached_tokens": 0}}
        return web.json_response({"choices": [{"text": "x"}], "usage": usage})


def ids_of(span):
    assert span.context is not None
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def test_a_request_has_a_span_and_one_for_each_of_its_parts(one_redis_server, redis):
    exporter = InMemorySpanExporter()
    provider = provider_of(exporter)
    engine = Engine(503)
    async with (
        completing(redis, "a", engine.complete),
        completing(redis, "b", engine.complete),
        replica(one_redis_server.url, Tracing(provider)) as door,
    ):
        await until_serving(door, 2)
        answer = await door.post("/v1/completions", json=ASKED, headers=PARENT)
        assert answer.status_code == 200
        await asyncio.to_thread(provider.force_flush)
        *parts, root = exporter.get_finished_spans()
        assert [span.name for span in parts] == ["tokens", "decide", "try", "decide", "try"]
        assert ids_of(root)[0] == TRACE
        assert root.parent is not None
        assert f"{root.parent.span_id:016x}" == SPAN
        assert {span.parent.span_id for span in parts if span.parent} == {
            root.get_span_context().span_id
        }
        tries = [span for span in parts if span.name == "try"]
        assert [span.status.status_code for span in tries] == [StatusCode.ERROR, StatusCode.UNSET]
        sent = [headers["traceparent"].split("-")[1:3] for headers in engine.headers]
        assert sent == [list(ids_of(span)) for span in tries]
        assert {headers["tracestate"] for headers in engine.headers} == {"vendor=1"}
        found = dict(root.attributes or {})
        assert found["kvroute.worker"] == answer.headers["x-kvroute-worker"]
        assert found["kvroute.tries"] == 2
        assert found["gen_ai.usage.input_tokens"] == 5
        assert found["gen_ai.request.model"] == "m"
        assert root.events == ()  # nobody saw a first token of an answer that came whole
        await door.post("/v1/completions", json=ASKED | {"stream": True}, headers=PARENT)
        await asyncio.to_thread(provider.force_flush)
        root = exporter.get_finished_spans()[-1]
        assert [event.name for event in root.events] == ["first token"]
        assert root.resource.attributes["service.name"] == "kvroute"


async def test_requests_that_fail_have_spans_that_say_so(one_redis_server, redis):
    exporter = InMemorySpanExporter()
    provider = provider_of(exporter)
    async with (
        completing(redis, "a", Engine(500, 500).complete),
        replica(one_redis_server.url, Tracing(provider)) as door,
    ):
        await until_serving(door, 1)
        assert (await door.post("/v1/completions", json=ASKED)).status_code == 500
        bad = ASKED | {"prompt": {}}
        assert (await door.post("/v1/completions", json=bad)).status_code == 400
        await asyncio.to_thread(provider.force_flush)
        roots = [span for span in exporter.get_finished_spans() if span.parent is None]
        assert [span.status.status_code for span in roots] == [StatusCode.ERROR] * 2
        assert [dict(span.attributes or {}).get("error.type") for span in roots] == [
            None,
            "InvalidRequest",
        ]


async def test_without_an_exporter_the_context_goes_on_as_it_came(one_redis_server, redis):
    engine = Engine()
    async with completing(redis, "a", engine.complete), replica(one_redis_server.url) as door:
        await until_serving(door, 1)
        for headers in (PARENT, {}):
            answer = await door.post("/v1/completions", json=ASKED, headers=headers)
            assert answer.status_code == 200
    assert {name: engine.headers[0][name] for name in PARENT} == PARENT
    assert engine.headers[1].keys().isdisjoint(PARENT)


async def test_an_exporter_that_the_environment_names_gets_the_spans_before_the_end(
    one_redis_server, redis, monkeypatch
):
    names = []

    async def collect(request):
        body = ExportTraceServiceRequest.FromString(await request.read())
        for group in body.resource_spans:
            names.extend(span.name for scope in group.scope_spans for span in scope.spans)
        return web.Response()

    app = web.Application()
    app.add_routes([web.post("/v1/traces", collect)])
    async with TestServer(app) as server:
        named = {"OTEL_EXPORTER_OTLP_ENDPOINT": str(server.make_url("")).rstrip("/")}
        named["OTEL_EXPORTER_OTLP_COMPRESSION"] = "none"
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        async with (
            completing(redis, "a", Engine().complete),
            replica(one_redis_server.url, Tracing(provider_named(named))) as door,
        ):
            await until_serving(door, 1)
            assert (await door.post("/v1/completions", json=ASKED)).status_code == 200
        assert names == ["tokens", "decide", "try", "completions"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
        {"OTEL_SERVICE_NAME": "x"},
    ],
)
def test_nothing_is_recorded_unless_an_exporter_is_named(environment):
    assert provider_named(environment) is None


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER is zipkin"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL is grpc",
        ),
    ],
)
def test_an_exporter_that_is_not_spoken_is_refused(environment, said):
    with pytest.raises(ConfigError, match=said):
        provider_named(environment)
