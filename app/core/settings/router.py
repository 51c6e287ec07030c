"""Settings of a router."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.core.settings.kinds import (
    COMMON,
    COUNT,
    PORT,
    POSITIVE,
    POSITIVE_SECONDS,
    SECONDS,
    SEED,
    WEIGHTS,
    CommonSettings,
    Integers,
    OneOf,
    PolicyName,
    Real,
    Text,
    drain_setting,
    parse_aliases,
    parse_names,
    parse_origins,
    parse_sharing,
    setting,
)


@dataclass(frozen=True, slots=True)
class RouterSettings(CommonSettings):
    api_key: str = setting(
        "",
        "Key that every request must carry (Authorization: Bearer KEY), except for /health and "
        "/readiness. Better given by the variable, as `ps` shows flags.",
        heading="Access",
        often=True,
    )
    api_key_file: str = setting(
        "",
        "File with further keys, one on each line: `NAME KEY`, behind them `metrics` for one as "
        "--metrics-key or `operator` for one that opens the console too, and limits such as "
        "requests=600/m. It is read again when it changes, and on SIGHUP.",
        often=True,
    )
    metrics_key: str = setting(
        "", "Key that opens /metrics and nothing else. Once there is one, /metrics needs a key."
    )
    no_auth: bool = setting(
        False,
        "Listen on addresses other than loopback although no key is set: a proxy in front "
        "checks keys.",
        bool,
    )
    console: bool = setting(
        True,
        "Serve the console at /console/, and tell other replicas what this one measures. Where "
        "keys are on, its data opens to --api-key and to operators' keys.",
        bool,
    )
    worker_key: str = setting("", "Key that is sent to workers, which require it.", often=True)
    tls_cert: str = setting(
        "",
        "File with a certificate and its chain (PEM), to speak TLS alone; read again when it or "
        "--tls-key changes, and on SIGHUP.",
        often=True,
    )
    tls_key: str = setting(
        "", "File with that certificate's key (PEM, without a password).", often=True
    )
    cors_origin: str = setting(
        "",
        "Origins whose pages may call this router from a browser, separated by commas; *: any.",
        Text("ORIGIN,...", parse_origins, ","),
    )
    tokenizers: str = setting(
        "",
        "Sources of the models' tokenizers, NAME=FOLDER_OR_HUGGING_FACE_NAME,..., NAME as requests "
        "name the model or as its engines were started with it; unset: as their workers report.",
        Text("NAME=SOURCE,...", parse_names, ","),
        heading="Front door",
        often=True,
    )
    model_alias: str = setting(
        "",
        "Other names for models, ALIAS=MODEL,...; a model is answered under both. An alias goes "
        "before a model of that name.",
        Text("ALIAS=MODEL,...", parse_aliases, ","),
        often=True,
    )
    namespace_weights: str = setting(
        "",
        "Namespaces that share the names of their models, and the weight by which each gets "
        "requests, NAMESPACE=WEIGHT,...; 0: none but those of sessions that are there. A semicolon "
        "parts groups of them. Else, who claimed a name first gets all of its requests.",
        Text("NAMESPACE=WEIGHT,...", parse_sharing, ";"),
    )
    max_request_bytes: int = setting(
        16 * 1024 * 1024, "Larger bodies of requests are refused (413).", POSITIVE, heading="Limits"
    )
    max_held_bytes: int = setting(
        256 * 1024 * 1024,
        "While the bodies of all requests in flight are larger together, only those up to 16 KB "
        "are taken (503).",
        POSITIVE,
        heading="Limits",
    )
    answer_timeout_s: float = setting(
        600.0,
        "How long a stream may take to begin, over all retries.",
        POSITIVE_SECONDS,
        heading="Front door",
    )
    whole_timeout_s: float = setting(
        3600.0,
        "How long an answer may take that is not streamed: all of it comes at once.",
        POSITIVE_SECONDS,
    )
    gap_timeout_s: float = setting(
        300.0, "Longest pause between two chunks of an engine's answer.", POSITIVE_SECONDS
    )
    migrate: bool = setting(
        False,
        "Continue a stream on another worker when its worker fails; engines are then asked for "
        "token ids.",
        bool,
    )
    stalled_s: float = setting(
        60.0,
        "A client that reads nothing of its answer for this long is disconnected.",
        POSITIVE_SECONDS,
    )
    comment_every_s: float = setting(
        15.0,
        "A stream that has not begun gets its headers and a comment, and another one each time "
        "that so long has passed: balancers cut connections on which nothing comes. 0: none.",
        SECONDS,
    )
    drain_s: float = drain_setting()
    show_decision: bool = setting(
        False,
        "Answers name their worker and its overlap (x-kvroute-worker, -overlap, -trust).",
        bool,
    )
    access_log: bool = setting(
        False,
        "A line of JSON on standard output for each request of an OpenAI client.",
        bool,
        often=True,
    )
    usage_days: int = setting(
        35, "For how many days Redis keeps what each key has used.", Integers(1, 3660)
    )
    log_identities: str = setting(
        "plain",
        "How that line names sessions and users: plain, as clients do, or as a hash.",
        OneOf(("plain", "hash")),
    )
    port: int = setting(
        8080, "Port to listen on; 0 takes a free one.", PORT, heading=COMMON, often=True
    )
    policy: str = setting(
        "latency",
        "Cost function for requests that name none.",
        PolicyName(),
        heading="Decisions",
        often=True,
    )
    temperature: float = setting(
        0.0,
        "Softmax temperature of the choice by cost; 0 always takes the lowest cost.",
        Real(0, 1000),
    )
    seed: int | None = setting(None, "Seed for random choices; unset: a random one.", SEED)
    redis_timeout_ms: int = setting(
        250,
        "Milliseconds to wait for Redis; after that, requests are routed by the last loads seen.",
        Integers(1, 600_000),
        heading="Redis",
    )
    read_from: str = setting(
        "master",
        "Where to look up overlap. Replicas (of Sentinel or a Cluster) take load off the masters "
        "but lag slightly behind.",
        OneOf(("master", "replica")),
    )
    prediction_ttl_s: float = setting(
        120.0,
        "How long blocks routed to a worker count as cached there, of workers that publish "
        "nothing.",
        POSITIVE_SECONDS,
        heading="What workers cache",
    )
    decisions_kept: int = setting(
        8192,
        "Decisions kept in Redis for `kvroute explain`, `whatif` and `inspect usage`; 0: none.",
        COUNT,
        heading="Records of decisions",
    )
    details_per_s: int = setting(
        20,
        "Decisions a second that are recorded with all their candidates (fewer with more than "
        "64 workers), besides those of requests that ask to be explained.",
        COUNT,
    )
    reservation_ttl_s: float = setting(
        600.0,
        "A reservation not released within this time of its first token expires. What the front "
        "door carries stays reserved until it ends, and for ten seconds if its replica dies.",
        POSITIVE_SECONDS,
        heading="Reservations",
    )
    prefill_ttl_s: float = setting(
        60.0,
        "A reservation expires after this time, plus four times "
        "what its worker's queue of prefills was predicted to last, if no first token is reported.",
        POSITIVE_SECONDS,
    )
    agent_away_s: float = setting(
        86_400.0,
        "For how long a worker stays in service whose agent is away, while its engine answers; 0: "
        "until its lease ends.",
        SECONDS,
        heading="Agents that are away",
    )
    wait_queue: int = setting(
        512,
        "Requests that may wait at this replica while no worker can take them; 0: they are refused "
        "(429).",
        Integers(0, 4096),
        heading="Waiting",
        often=True,
    )
    wait_above_s: float = setting(
        0.02,
        "While requests of several tenants or priorities come in, they wait while every worker's "
        "prefill queue is predicted to last longer than this; with one, while all workers are at "
        "--max-requests.",
        SECONDS,
    )
    wait_timeout_s: float = setting(
        10.0, "A request that has waited this long is refused (429).", POSITIVE_SECONDS
    )
    tenant_weights: str = setting(
        "",
        "Weights of tenants in the fair queue of waiting requests, NAME=WEIGHT,...; all others "
        "weigh 1.",
        WEIGHTS,
    )
    session_affinity: float = setting(
        0.0,
        "0-1: the worker a session last went to is credited with this fraction of the part of the "
        "prompt that it does not hold; 0 ignores sessions.",
        Real(0, 1),
        heading="Sessions",
        often=True,
    )
    strict_roles: bool = setting(
        False,
        "Workers with the role decode compute no prompts, not even where that is the quickest.",
        bool,
        heading="Roles and transfers",
    )
    kv_lease_s: float = setting(
        30.0,
        "How long a source keeps blocks that wait to be fetched, in seconds, where its worker does "
        "not say: as its engine is set. So long at least they count.",
        POSITIVE_SECONDS,
    )
    max_prompt_tokens: int = setting(
        1_048_576, "Longer prompts are refused (422).", POSITIVE, heading="Limits"
    )
    shared_fd: int | None = setting(
        None,
        "An inherited listening socket to serve as well, shared with other replicas.",
        Integers(0, 2**31 - 1),
        heading=COMMON,
    )

    @property
    def max_queue_s(self) -> float:
        """Longest prefill queue, in seconds, of a worker that takes requests while several flows
        come in; infinite if no request may wait."""
        return self.wait_above_s if self.wait_queue else math.inf


CARRIAGE_SETTINGS = (
    *("shared_fd", "migrate", "stalled_s", "comment_every_s", "kv_lease_s", "strict_roles"),
)
"""Settings of how a router carries requests, which a gateway does in its place."""


@dataclass(frozen=True, slots=True)
class PickerSettings(RouterSettings):
    """Settings of a replica that tells a gateway where each request goes."""

    grpc_port: int = setting(
        9002,
        "Port on which gateways ask, by gRPC; 0 takes a free one.",
        PORT,
        heading=COMMON,
        often=True,
    )
    send_ids: bool = setting(
        False,
        "Requests go on to engines with the ids of their prompts, which then need not tokenize "
        "them again.",
        bool,
        heading="Gateway",
        often=True,
    )
    obey_test_header: bool = setting(
        False,
        "Obey the header test-epp-endpoint-selection, by which tests of gateways choose workers.",
        bool,
    )
