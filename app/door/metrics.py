"""What is told of requests that have ended: metrics, and a line of the access log."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry

from app.door.access_log import AccessLog
from app.door.alarm import Alarm
from app.door.record import Admitted, RequestRecord, Usage
from app.http.metrics import Table, counter, histogram

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class _Metrics(Table):
    requests = counter(
        "door_requests",
        "Requests of OpenAI clients that have ended, refused ones too: by model, if the door knows "
        "it; by how they ended, ok or the code of an error; and by the status of the answer, 499 "
        "if the client had gone.",
        "model",
        "outcome",
        "code",
    )
    retries = counter(
        "door_retries",
        "Workers that failed a request before its first byte, so that another took it.",
        "model",
    )
    migrations = counter(
        "door_migrations",
        "Streams whose worker failed, and that another worker went on with.",
        "model",
    )
    tokens_from = counter(
        "door_tokens_from",
        "Requests by who knew their ids: client, router, engine; blind:<why>: nobody.",
        "model",
        "source",
    )
    tokens = counter(
        "door_tokens",
        "Tokens as engines counted them, by kind: prompt, cached, output.",
        "model",
        "kind",
    )
    apart = counter(
        "door_cached_apart_tokens",
        "Tokens by which the cached ones that a worker told differed from the predicted.",
        "model",
        "worker",
    )
    compared = counter(
        "door_cached_compared_tokens",
        "Prompt tokens of the requests that were compared so.",
        "model",
        "worker",
    )
    ttft = histogram(
        "door_ttft_seconds", "Time from a request to its first token.", "model", buckets=_SECONDS
    )
    per_token = histogram(
        "door_time_per_output_token_seconds",
        "Mean time between two tokens of an answer.",
        "model",
        buckets=_PER_TOKEN,
    )
    duration = histogram(
        "door_request_seconds",
        "Time from a request to the end of its answer.",
        "model",
        buckets=_SECONDS,
    )


class Outcomes:
    """Counts what has ended, and logs it."""

    def __init__(self, registry: CollectorRegistry, log: AccessLog) -> None:
        self.alarm = Alarm()
        self._log = log
        metrics = _Metrics(registry)
        # Found by the library under a lock and as text, they would be a tenth of the door's CPU.
        self._requests = cache(metrics.requests.labels)
        self._retries = cache(metrics.retries.labels)
        self._migrations = cache(metrics.migrations.labels)
        self._tokens_from = cache(metrics.tokens_from.labels)
        self._tokens = cache(metrics.tokens.labels)
        self._apart = cache(metrics.apart.labels)
        self._compared = cache(metrics.compared.labels)
        self._ttft = cache(metrics.ttft.labels)
        self._per_token = cache(metrics.per_token.labels)
        self._duration = cache(metrics.duration.labels)

    def ended(self, record: RequestRecord) -> None:
        """Count one request."""
        model = record.model.name if record.model else ""
        self._requests(model, record.outcome, str(record.status)).inc()
        if record.admitted is not None:
            self._count_admitted(model, record.admitted, record)
        self._log.ended(record)

    def _count_admitted(self, model: str, admitted: Admitted, record: RequestRecord) -> None:
        self._tokens_from(model, admitted.tokens_from).inc()
        if record.failed:
            self._retries(model).inc(len(record.failed))
        if record.migrations:
            self._migrations(model).inc(record.migrations)
        self._duration(model).observe(record.ended_s - record.began_s)
        if record.first_token_s:
            self._ttft(model).observe(record.first_token_s - record.began_s)
        if record.usage is not None:
            self._count_tokens(model, record.usage, record)

    def _count_tokens(self, model: str, usage: Usage, record: RequestRecord) -> None:
        self._tokens(model, "prompt").inc(usage.prompt)
        self._tokens(model, "output").inc(usage.output)
        if record.first_token_s and usage.output > 1:
            took_s = record.ended_s - record.first_token_s
            self._per_token(model).observe(took_s / (usage.output - 1))
        if usage.cached is None:
            return
        self._tokens(model, "cached").inc(usage.cached)
        predicted = record.predicted_cached
        if predicted is not None and record.decision is not None:
            worker = str(record.decision.worker.key)
            self._compared(model, worker).inc(usage.prompt)
            self._apart(model, worker).inc(abs(usage.cached - predicted))
            self.alarm.compare(model, worker, usage.prompt, predicted, usage.cached)
