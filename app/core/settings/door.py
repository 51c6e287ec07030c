"""Settings of the front door."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.settings.kinds import (
    POSITIVE,
    POSITIVE_SECONDS,
    SECONDS,
    CommonSettings,
    Integers,
    OneOf,
    Text,
    drain_setting,
    parse_aliases,
    parse_names,
    parse_origins,
    parse_sharing,
    setting,
)


@dataclass(frozen=True, slots=True)
class DoorSettings(CommonSettings):
    """Settings of how a replica takes requests of OpenAI clients and carries them to engines."""

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
