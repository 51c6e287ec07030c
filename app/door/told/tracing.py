"""One trace for each request, where OTEL_* variables name an exporter."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from app.core.errors import ConfigError
from app.core.extras import extra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

    from app.door.record import RequestRecord

Headers = list[tuple[bytes, bytes]]

CONTEXT = (b"traceparent", b"tracestate")
"""Headers of W3C Trace Context."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SPOKEN = "http/protobuf"


class SpanTrace:
    """Spans: the request's own; in it tokens, each decide and each try."""

    def __init__(self, tracer: Any, api: str, headers: Mapping[bytes, bytes]) -> None:
        with extra("otel"):
            from opentelemetry import trace
            from opentelemetry.trace.propagation import tracecontext

        self._otel = trace
        self._tracer = tracer
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        given = {
            name.decode(): headers[name].decode("latin-1") for name in CONTEXT if name in headers
        }
        self._root = tracer.start_span(
            api,
            self._propagator.extract(given),
            kind=trace.SpanKind.SERVER,
            attributes={"gen_ai.operation.name": api},
        )
        self._context = trace.set_span_in_context(self._root)
        self._try: Any = None

    def span(self, name: str) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._tracer.start_as_current_span(
            name, self._context
        )
        return context

    def try_begins(self, worker: str) -> Headers:
        self._try = self._tracer.start_span(
            "try",
            self._context,
            kind=self._otel.SpanKind.CLIENT,
            attributes={"kvroute.worker": worker},
        )
        carried: dict[str, str] = {}
        self._propagator.inject(carried, self._otel.set_span_in_context(self._try))
        return [(name.encode(), value.encode()) for name, value in carried.items()]

    def try_ends(self, error: str = "") -> None:
        span, self._try = self._try, None
        if span is not None:
            if error:
                span.set_status(self._otel.StatusCode.ERROR, error)
            span.end()

    def first_token(self) -> None:
        self._root.add_event("first token")

    def end(self, record: RequestRecord) -> None:
        is_ok = record.outcome == "ok"
        self.try_ends("" if is_ok else record.outcome)
        decision, usage = record.decision, record.usage
        assert record.model is not None
        assert record.ids is not None
        attributes: dict[str, object] = {
            "gen_ai.request.model": record.model_name,
            "http.response.status_code": record.status,
            "kvroute.request_id": record.request_id,
            "kvroute.namespace": record.model.namespace,
            "kvroute.tokens_from": record.ids.tokens_from,
            "kvroute.tries": record.tries,
            "kvroute.outcome": record.outcome,
        }
        if decision is not None:
            attributes["kvroute.worker"] = str(decision.worker.key)
            attributes["kvroute.overlap_blocks"] = decision.overlap.total
        if record.predicted_cached is not None:
            attributes["kvroute.predicted_cached_tokens"] = record.predicted_cached
        if usage is not None:
            attributes["gen_ai.usage.input_tokens"] = usage.prompt
            attributes["gen_ai.usage.output_tokens"] = usage.output
            if usage.cached is not None:
                attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached
        self._root.set_attributes(attributes)
        if not is_ok:
            self._root.set_status(self._otel.StatusCode.ERROR, record.outcome)
        self._root.end()

    def fail(self, error: BaseException) -> None:
        self._root.set_attribute("error.type", type(error).__name__)
        self._root.set_status(self._otel.StatusCode.ERROR, str(error))
        self._root.end()


class Tracing:
    """Begins traces, until closed. provider: None: they are not recorded."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("kvroute")

    def begin(self, api: str, headers: Mapping[bytes, bytes]) -> SpanTrace | None:
        """Returns the trace of a request; None if traces are not recorded."""
        return None if self._tracer is None else SpanTrace(self._tracer, api, headers)

    def close(self) -> None:
        """Sends what is left. Takes until that is out, or the exporter gives it up."""
        if self._provider is not None:
            self._provider.shutdown()


def provider_named(environment: Mapping[str, str]) -> TracerProvider | None:
    """Returns what exports spans as OTEL_* variables say; None if they name no exporter. The SDK
    reads endpoint, headers, sampler and the service's name itself. Raises ConfigError, and
    MissingPackage."""
    chosen = environment.get("OTEL_TRACES_EXPORTER", "")
    is_named = chosen or any(environment.get(name) for name in _ENDPOINTS)
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or chosen == "none":
        is_named = ""
    if not is_named:
        return None
    if chosen not in ("", "otlp"):
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {chosen}, but only otlp and none are spoken")
    for name in _PROTOCOLS:
        if environment.get(name, _SPOKEN) != _SPOKEN:
            raise ConfigError(f"{name} is {environment[name]}, but only {_SPOKEN} is spoken")
    with extra("otel", "OTEL_* variables name an exporter of traces"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    return provider_of(OTLPSpanExporter())


def provider_of(exporter: SpanExporter) -> TracerProvider:
    with extra("otel"):
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource({"service.name": "kvroute"}).merge(OTELResourceDetector().detect())
    # The replica ends in its own time, and closes it then.
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
