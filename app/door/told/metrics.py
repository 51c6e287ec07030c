"""Metrics of requests that have ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping

from prometheus_client import CollectorRegistry

from app.core.outcomes import ANSWERED, OK, WORKER_FAILED, Ending, Kind, kind_of
from app.core.trust import Trust
from app.core.usage import BY, OTHER, UsageSums, Who
from app.door.record import STAGES, RequestRecord, Stage, Usage
from app.door.told.access_log import AccessLog
from app.door.told.alarm import Alarm
from app.door.told.last_errors import LastErrors
from app.http.metrics import Children, Family, Sampled, ScrapeCollector, Table, counter, histogram

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
MAX_KEYS = 64
"""Names of keys that metrics tell apart."""
_FEW_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class _Metrics(Table):
    requests = counter(
        "door_requests",
        "Requests that have ended, refused ones too: by model, if the door knows "
        "it; by how they ended: ok; engine_error, engine_full: an engine's own error; refused: an "
        "engine takes it for the request's fault; error_event: an error within an answer; cut: one "
        "that broke off; "
        "worker_failed, repeated_failure, answer_timeout: no engine answered; left_before_token, "
        "left_after_token: the client did, before its first token or after it; else the code of "
        "the router's error; and by the status of the answer, 499 if the client had gone. Those "
        "that clients of /v1/route carried, by what these report: ok, or worker_failed.",
        "model",
        "outcome",
        "code",
    )
    retries = counter(
        "door_retries",
        "Retries on another worker after one failed before the first byte of its answer.",
        "model",
    )
    sources = counter(
        "door_sources",
        "Requests for which another worker computed the prompt, or handed on a part of it.",
        "model",
    )
    migrations = counter(
        "door_migrations",
        "Streams continued on another worker after theirs failed.",
        "model",
    )
    tokens_from = counter(
        "door_tokens_from",
        "Requests by the source of their token ids: client, router or engine; blind:<reason>: "
        "none.",
        "model",
        "source",
    )
    tokens = counter(
        "door_tokens",
        "Tokens as engines counted them, by kind: prompt, output; cached, and told: prompts of "
        "which they said how much was; predicted: of these, what was thought to be cached. Of "
        "answers of which they did not tell all, as their clients left: prompt_by_router, "
        "output_by_router, and cached_by_router, as predicted.",
        "model",
        "kind",
    )
    apart = counter(
        "door_cached_apart_tokens",
        "Absolute difference between the cached tokens that were predicted and reported.",
        "model",
        "worker",
    )
    compared = counter(
        "door_cached_compared_tokens",
        "Prompt tokens of the requests for which that difference was measured.",
        "model",
        "worker",
    )
    ttft = histogram(
        "door_ttft_seconds", "Time from a request to its first token.", "model", buckets=SECONDS
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
        buckets=SECONDS,
    )
    stages = histogram(
        "door_stage_seconds",
        "What the time of requests was spent on, by stage: "
        + "; ".join(f"{stage}: {what}" for stage, what in STAGES.items())
        + ".",
        "model",
        "stage",
        buckets=SECONDS,
    )
    by_worker = counter(
        "door_worker_requests",
        "Requests that a worker was given, by how they ended there: as in kvroute_door_requests; "
        "failed or full if it was taken from it, and then by the cause.",
        "worker",
        "outcome",
        "cause",
    )
    worker_output = counter(
        "door_worker_output_tokens",
        "Tokens of answers of the worker that gave their last, as its engine or the router counted "
        "them.",
        "worker",
    )
    worker_sources = counter(
        "door_worker_sources",
        "Requests for which a worker computed another's prompt, or handed on a part of it.",
        "worker",
    )
    first_token = histogram(
        "door_worker_first_token_seconds",
        "Time from the decision for a worker to its first token.",
        "worker",
        buckets=_FEW_SECONDS,
    )
    key_requests = counter(
        "key_requests",
        "Requests that have ended, by the key that they came with, else by their tenant, else as "
        "`anonymous`, and by how they ended: ok, engine, cut, left_before, left_after, unfit, "
        "refused. Past 64 names, new ones are `other`.",
        "key",
        "ended",
    )
    key_tokens = counter(
        "key_tokens",
        "Tokens that these requests used, by kind: prompt; cached, of the prompt; output.",
        "key",
        "kind",
    )
    key_limited = counter(
        "key_limited",
        "Requests that the limits of their key refused, by limit: requests, tokens, uncached, "
        "concurrent.",
        "key",
        "limit",
    )
    key_waited = counter(
        "key_waited_seconds",
        "Time for which these requests waited for a worker that could take them.",
        "key",
    )


TOKENIZER_APART = Family(
    "kvroute_door_tokenizer_apart",
    "gauge",
    "1 if the door's tokenizer of a model gives other ids than its engine, which then tokenizes, "
    "else 0.",
    ("model",),
)


class Outcomes:
    """Counts what has ended, and logs it. apart: tells of each model whether its tokenizer is."""

    def __init__(
        self,
        registry: CollectorRegistry,
        log: AccessLog,
        last_errors: LastErrors,
        apart: Callable[[], Mapping[str, bool]] = dict,
    ) -> None:
        self.alarm = Alarm()
        self._log = log
        self._last_errors = last_errors
        metrics = _Metrics(registry)

        def tokenizers() -> Iterator[Sampled]:
            for model, is_apart in apart().items():
                yield TOKENIZER_APART, (model,), float(is_apart)

        registry.register(ScrapeCollector([TOKENIZER_APART], tokenizers))
        self._requests = Children(metrics.requests)
        self._retries = Children(metrics.retries)
        self._migrations = Children(metrics.migrations)
        self._sources = Children(metrics.sources)
        self._tokens_from = Children(metrics.tokens_from)
        self._tokens = Children(metrics.tokens)
        self._apart = Children(metrics.apart)
        self._compared = Children(metrics.compared)
        self._ttft = Children(metrics.ttft)
        self._per_token = Children(metrics.per_token)
        self._duration = Children(metrics.duration)
        self._stages = Children(metrics.stages)
        self._by_worker = Children(metrics.by_worker)
        self._worker_output = Children(metrics.worker_output)
        self._worker_sources = Children(metrics.worker_sources)
        self._first_token = Children(metrics.first_token)
        self._names = set[str]()
        self._key_requests = Children(metrics.key_requests, math.inf)
        self._key_tokens = Children(metrics.key_tokens, math.inf)
        self._key_limited = Children(metrics.key_limited, math.inf)
        self._key_waited = Children(metrics.key_waited, math.inf)

    def keep_workers(self, names: Collection[str]) -> None:
        """Forgets what was counted for all other workers."""
        for children, position in (
            (self._apart, 1),
            (self._compared, 1),
            (self._by_worker, 0),
            (self._worker_output, 0),
            (self._worker_sources, 0),
            (self._first_token, 0),
        ):
            children.keep(position, names)

    def ended(self, record: RequestRecord, used: tuple[Who, UsageSums] | None) -> None:
        """Counts one request."""
        model = record.model_name
        self._requests[model, record.outcome, str(record.status)].value += 1
        if used is not None:
            name = self._count_key(BY["key"](used[0]), used[1], kind_of(record.outcome))
            if record.spending is not None and record.spending.refused is not None:
                self._key_limited[name, record.spending.refused.limit].value += 1
        if record.ids is not None:
            self._tokens_from[model, record.ids.tokens_from].value += 1
            self._count_admitted(model, record)
        self._count_workers(record)
        self._log.ended(record)
        if record.failures or record.outcome != OK:
            self._last_errors.ended(record)

    def _count_key(self, name: str, used: UsageSums, kind: Kind) -> str:
        """Returns the name under which the key is counted."""
        if name not in self._names:
            if len(self._names) >= MAX_KEYS:
                name = OTHER
            self._names.add(name)
        self._key_requests[name, kind].value += 1
        if used.prompt_tokens:
            self._key_tokens[name, "prompt"].value += used.prompt_tokens
            self._key_tokens[name, "cached"].value += used.cached_tokens
            self._key_tokens[name, "output"].value += used.output_tokens
        if used.waited_ms:
            self._key_waited[name].value += used.waited_ms / 1000
        return name

    def reported(self, model: str, ending: Ending | None, *, has_failed: bool) -> None:
        """Counts a request that its client has carried. ending: what the client says; None:
        nothing."""
        self._requests[model, WORKER_FAILED if has_failed else OK, ""].value += 1
        if ending is not None:
            self._tokens[model, "output"].value += ending.output_tokens
            if ending.ttft_ms is not None:
                self._ttft[model].observe(ending.ttft_ms / 1000)

    def _count_admitted(self, model: str, record: RequestRecord) -> None:
        if record.failures:
            self._retries[model].value += len(record.failures)
        if record.migrations:
            self._migrations[model].value += record.migrations
        if record.decision is not None and record.decision.source is not None:
            self._sources[model].value += 1
            self._worker_sources[str(record.decision.source.worker.key)].value += 1
        self._duration[model].observe(record.ended_s - record.began_s)
        if record.first_token_s:
            self._ttft[model].observe(record.first_token_s - record.began_s)
        if record.usage is not None:
            self._count_tokens(model, record.usage, record)
        for stage, seconds in record.spent_s.items():
            self._stages[model, stage].observe(seconds)

    def _count_workers(self, record: RequestRecord) -> None:
        for failed in record.failures:
            self._by_worker[failed.worker, failed.result, failed.cause].value += 1
        worker = record.worker
        has_failed = worker in (failed.worker for failed in record.failures)
        if not worker or (has_failed and kind_of(record.outcome) not in ANSWERED):
            return  # it was given to no other one, nor answered at a second try
        self._by_worker[worker, record.outcome, ""].value += 1
        if record.first_token_s and not record.migrations:
            self._first_token[worker].observe(record.spent_s[Stage.FIRST_TOKEN])

    def _count_tokens(self, model: str, usage: Usage, record: RequestRecord) -> None:
        if worker := record.worker:
            self._worker_output[worker].value += usage.output
        if usage.by_router:
            self._tokens[model, "prompt_by_router"].value += usage.prompt
            self._tokens[model, "output_by_router"].value += usage.output
            self._tokens[model, "cached_by_router"].value += usage.cached or 0
            return
        self._tokens[model, "prompt"].value += usage.prompt
        self._tokens[model, "output"].value += usage.output
        if record.first_token_s and usage.output > 1:
            took_s = record.ended_s - record.first_token_s
            self._per_token[model].observe(took_s / (usage.output - 1))
        if usage.cached is None:
            return
        self._tokens[model, "cached"].value += usage.cached
        self._tokens[model, "told"].value += usage.prompt
        predicted = record.predicted_cached
        self._tokens[model, "predicted"].value += predicted or 0
        if predicted is not None and record.decision is not None:
            worker = str(record.decision.prompt_worker.key)
            self._compared[model, worker].value += usage.prompt
            self._apart[model, worker].value += abs(usage.cached - predicted)
            self.alarm.compare(
                *(model, worker, usage.prompt, predicted, usage.cached),
                at_least=record.decision.trust is Trust.BOUND,
            )
