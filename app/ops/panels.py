"""What deploy/grafana.json shows, row by row."""

from __future__ import annotations

from app.core.outcomes import NEVER_CAME, matching
from app.ops.dashboard import Row, chart, most, of_all, quantile, rate, share, stack, tile

HIGH_IS_GOOD = {None: "red", 0.95: "orange", 0.99: "green"}
NONE_IS_GOOD = {None: "green", 0.001: "red"}
REQUESTS = rate("door_requests_total")
NEVER = rate("door_requests_total", outcome=matching(*NEVER_CAME))
PROMPTS = rate("reuse_tokens_total", step="prompt")
ENGINES = "$workers"
PLANNERS = "$planners"


def median_and_p95(metric: str, by: str) -> list[tuple[str, str]]:
    name = f"{{{{{by}}}}}"
    return [
        (quantile(0.5, metric, by), f"{name} p50"),
        (quantile(0.95, metric, by), f"{name} p95"),
    ]


GLANCE = [
    tile(
        "First token in time",
        "Share of the requests whose first token came within the target, a variable; of all that "
        "got one, were failed, or left before it.",
        "percentunit",
        share(
            rate("door_ttft_seconds_bucket", le="$target_s"),
            f"({rate('door_ttft_seconds_count')} + ({NEVER} or vector(0)))",
        ),
        HIGH_IS_GOOD,
    ),
    tile(
        "Answered",
        "Share of the requests that neither routers nor workers failed.",
        "percentunit",
        share(rate("door_requests_total", not_code="5.."), REQUESTS),
        HIGH_IS_GOOD,
    ),
    tile(
        "First token, p95",
        "From a request to its first token.",
        "s",
        quantile(0.95, "door_ttft_seconds"),
    ),
    tile(
        "Decisions, p99",
        "From a request's hashes to its worker.",
        "s",
        quantile(0.99, "decision_seconds"),
        {None: "green", 0.02: "orange", 0.1: "red"},
    ),
    tile(
        "Used from cache",
        "Share of the prompt tokens that engines had cached.",
        "percentunit",
        share(rate("reuse_tokens_total", step="used|unforeseen"), PROMPTS),
    ),
    tile(
        "Without overlap",
        "Decisions a second without Redis, or without a shard of the index.",
        "reqps",
        f"{rate('degraded_decisions_total')} + {rate('blind_decisions_total')}",
        NONE_IS_GOOD,
    ),
]
DOOR = [
    stack(
        "Requests",
        "Requests of OpenAI and Anthropic clients a second, by status.",
        "reqps",
        (rate("door_requests_total", "code"), "{{code}}"),
    ),
    stack(
        "Errors",
        "Requests a second that did not end well, by model and cause; without a model, they were "
        "refused before it was known.",
        "reqps",
        (
            rate("door_requests_total", "model, outcome", not_outcome="ok"),
            "{{model}} {{outcome}}",
        ),
    ),
    chart(
        "Requests without a valid key",
        "Share of all requests.",
        "percentunit",
        (share(rate("door_requests_total", outcome="invalid_api_key"), REQUESTS), "without a key"),
    ),
    chart(
        "Time to the first token",
        "From a request to its first token.",
        "s",
        *median_and_p95("door_ttft_seconds", "model"),
    ),
    chart(
        "Time per output token",
        "Mean of an answer.",
        "s",
        *median_and_p95("door_time_per_output_token_seconds", "model"),
    ),
    stack(
        "What the time of a request goes into",
        "Mean seconds of a request, by stage.",
        "s",
        (
            of_all(rate("door_stage_seconds_sum", "stage"), rate("door_request_seconds_count")),
            "{{stage}}",
        ),
    ),
    chart(
        "Tokens",
        "Tokens a second: of prompts, those of them that were cached, and of answers.",
        "short",
        (rate("door_tokens_total", "kind"), "{{kind}}"),
    ),
    chart(
        "Tokenizers and caches apart",
        "1 for a model whose engine gives other ids than the routers; and the share of prompt "
        "tokens that was cached and not predicted, or the other way round.",
        "percentunit",
        (most("door_tokenizer_apart", "model"), "tokenizer of {{model}}"),
        (
            share(
                rate("door_cached_apart_tokens_total", "model"),
                rate("door_cached_compared_tokens_total", "model"),
            ),
            "cache of {{model}}",
        ),
    ),
    chart(
        "Workers that were given up",
        "Requests a second that another worker took before the first byte, and streams that "
        "another went on with.",
        "reqps",
        (rate("door_retries_total"), "taken over"),
        (rate("door_migrations_total"), "gone on with"),
    ),
]
REUSE = [
    chart(
        "How far reuse comes",
        "Of all prompt tokens: asked before, held by a worker, by one with room, by the chosen "
        "one, used by its engine.",
        "percentunit",
        (
            of_all(rate("reuse_tokens_total", "step", not_step="prompt|unforeseen"), PROMPTS),
            "{{step}}",
        ),
    ),
    stack(
        "Where it is lost",
        "Share of all prompt tokens that did not reach a step, by cause.",
        "percentunit",
        (
            of_all(rate("reuse_lost_tokens_total", "step, cause", not_step="seen"), PROMPTS),
            "{{step}}: {{cause}}",
        ),
    ),
    chart(
        "Used, by model",
        "Share of each model's prompt tokens that its engines had cached, as the router knew.",
        "percentunit",
        (
            share(
                rate("reuse_tokens_total", "model", step="used"),
                rate("reuse_tokens_total", "model", step="prompt"),
            ),
            "{{model}}",
        ),
    ),
    stack(
        "Evicted and computed again",
        "Prompt tokens a second that a worker had held, and that were computed again.",
        "short",
        (
            rate("reuse_lost_tokens_total", "cause", cause="evicted|race|recompute"),
            "{{cause}}",
        ),
    ),
    chart(
        "Blocks moved and lost",
        "Blocks a second of all engines, by what became of them.",
        "ops",
        (rate("engine_kv_block_events_total", "event", job=ENGINES), "{{event}}"),
    ),
    chart(
        "Unused before they were evicted",
        "For how long blocks that were evicted lately had gone unused, on each engine. Where that "
        "is short, memory is too.",
        "s",
        (most("engine_kv_idle_before_evict_seconds", "instance", job=ENGINES), "{{instance}}"),
    ),
    chart(
        "Prefill saved",
        "Seconds of prefill a second that workers were saved by what they held: as many "
        "accelerators.",
        "short",
        (rate("saved_prefill_seconds_total"), "saved"),
    ),
    stack(
        "Prompt blocks held by the chosen worker",
        "Share of the blocks of routed prompts, by the tier that held them.",
        "percentunit",
        (of_all(rate("overlap_blocks_total", "tier"), rate("isl_blocks_total")), "{{tier}}"),
    ),
    stack(
        "Longest overlap taken, or why not",
        "kept: the worker with the longest overlap was chosen; none: no worker held anything.",
        "reqps",
        (rate("locality_total", "reason"), "{{reason}}"),
    ),
]
DECISIONS = [
    stack(
        "Decisions",
        "Decisions a second, by outcome.",
        "reqps",
        (rate("decisions_total", "outcome"), "{{outcome}}"),
    ),
    chart(
        "Decision time",
        "From a request's hashes to its worker, reservation included.",
        "s",
        (quantile(0.5, "decision_seconds"), "p50"),
        (quantile(0.99, "decision_seconds"), "p99"),
    ),
    chart(
        "Redis round trips, p99",
        "Of decisions, by step.",
        "s",
        (quantile(0.99, "redis_round_trip_seconds", "step"), "{{step}}"),
    ),
    chart(
        "Decided without Redis or without the index",
        "Degraded: by load alone; blind: a shard of the index was unreachable.",
        "reqps",
        (rate("degraded_decisions_total"), "degraded"),
        (rate("blind_decisions_total"), "blind"),
    ),
    chart(
        "Reservations",
        "Events a second.",
        "ops",
        (rate("reservations_total", "event"), "{{event}}"),
    ),
    chart(
        "Conflicts",
        "Reservations refused because the worker had changed, was full or had lapsed, and "
        "decisions made again.",
        "ops",
        (rate("reserve_conflicts_total", "reason"), "{{reason}}"),
        (rate("decision_retries_total"), "made again"),
    ),
]
TENANTS = [
    chart(
        "Waiting for a worker",
        "Requests in line at all replicas (only with --wait-queue).",
        "short",
        (f"sum({most('waiting_requests', 'instance, namespace')})", "requests"),
    ),
    chart(
        "How long they wait",
        "Whatever became of them.",
        "s",
        (quantile(0.5, "waited_seconds"), "p50"),
        (quantile(0.99, "waited_seconds"), "p99"),
    ),
    stack(
        "Waits, by tenant",
        "Requests a second that had to wait. Tenants without a weight are one.",
        "reqps",
        (rate("waits_total", "tenant, priority"), "{{tenant}} {{priority}}"),
    ),
    stack(
        "Waits in vain, by tenant",
        "Requests a second that waited and were not routed, by what became of them.",
        "reqps",
        (rate("waits_total", "tenant, outcome", not_outcome="routed"), "{{tenant}} {{outcome}}"),
    ),
]
FLEET = [
    chart(
        "Queues",
        "Predicted length of each worker's queue of prefills.",
        "s",
        (most("worker_queue_seconds", "worker"), "{{worker}}"),
    ),
    chart(
        "KV caches in use",
        "As each worker reports.",
        "percentunit",
        (most("worker_cache_usage", "worker"), "{{worker}}"),
    ),
    chart(
        "Index fill, lag of measurements, stale workers",
        "Blocks in the index over those it was laid out for; age of the newest measurement, in "
        "seconds; workers that publish none.",
        "short",
        (most("index_fill"), "index fill"),
        (most("metrics_stream_lag_seconds"), "lag, s"),
        (f"sum({most('worker_stale', 'worker')})", "stale workers"),
        (f"count({most('worker_agent_away_seconds', 'worker')})", "agents away"),
    ),
    chart(
        "KV between workers",
        "In a minute, what workers fetched, and failed to; and leases on what they kept for others "
        "that ended, and fetches after that. Tainted workers get no requests.",
        "short",
        *(
            (f"60 * deriv({most(f'worker_kv_{name}', 'worker')}[5m:15s])", f"{{{{worker}}}} {what}")
            for name, what in (
                ("transfers", "fetched"),
                ("transfers_failed", "failed"),
                ("leases_ended", "leases ended"),
                ("fetched_late", "fetched late"),
            )
        ),
        (most("worker_tainted", "worker"), "{{worker}} tainted"),
    ),
]
ONE = "$worker"
WORKER = [
    chart(
        "Requests",
        "Reserved on it, and waiting in it, as it reports.",
        "short",
        (most("worker_requests", worker=ONE), "reserved"),
        (most("worker_requests_waiting", worker=ONE), "waiting"),
    ),
    chart(
        "Queue",
        "Predicted length of its queue of prefills.",
        "s",
        (most("worker_queue_seconds", worker=ONE), "queue"),
    ),
    chart(
        "First token",
        "From the decision for it to its first token.",
        "s",
        (quantile(0.5, "door_worker_first_token_seconds", worker=ONE), "p50"),
        (quantile(0.95, "door_worker_first_token_seconds", worker=ONE), "p95"),
    ),
    chart(
        "Cache",
        "KV memory in use, and the share of the blocks routed to it that it held.",
        "percentunit",
        (most("worker_cache_usage", worker=ONE), "in use"),
        (
            share(
                rate("worker_routed_blocks_total", worker=ONE, what="overlap"),
                rate("worker_routed_blocks_total", worker=ONE, what="isl"),
            ),
            "held",
        ),
    ),
    stack(
        "Errors",
        "Requests a second that it failed or had no room for.",
        "reqps",
        (
            rate(
                "door_worker_requests_total",
                "outcome",
                worker=ONE,
                outcome="failed|full|error_event|cut|engine_error",
            ),
            "{{outcome}}",
        ),
    ),
    chart(
        "GPU",
        "Share of the time in which it ran anything.",
        "percentunit",
        (most("worker_gpu_utilisation", worker=ONE), "busy"),
    ),
]
PLANNER = [
    chart(
        "Workers, now and wanted",
        "Live or starting, and as last proposed; live as routers see them.",
        "short",
        (most("planner_workers", "namespace", job=PLANNERS), "{{namespace}} now"),
        (most("planner_desired_workers", "namespace", job=PLANNERS), "{{namespace}} wanted"),
        (most("workers", "namespace"), "{{namespace}} live"),
    ),
    chart(
        "Reasons",
        "Of proposals, a minute.",
        "short",
        (
            f"60 * {rate('planner_proposals_total', 'namespace, reason', job=PLANNERS)}",
            "{{namespace}} {{reason}}",
        ),
        (
            f"60 * {rate('planner_failed_changes_total', 'namespace', job=PLANNERS)}",
            "{{namespace}} failed changes",
        ),
    ),
    chart(
        "Worth of each worker's cache",
        "Seconds of prefill that losing it would cost.",
        "s",
        (
            most("worker_unique_value_seconds", "namespace, worker", job=PLANNERS),
            "{{namespace}} {{worker}}",
        ),
    ),
]
ROWS = [
    Row("At a glance", GLANCE),
    Row("Front door", DOOR),
    Row("Reuse", REUSE),
    Row("Decisions", DECISIONS),
    Row("Waiting and tenants", TENANTS),
    Row("Workers", FLEET),
    Row("Worker $worker", WORKER, repeat="worker"),
    Row("Planner", PLANNER),
]
