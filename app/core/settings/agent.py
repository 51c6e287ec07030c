"""Settings of an agent beside an engine of another make."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.settings.kinds import (
    BASE_URL,
    COMMON,
    PORT,
    POSITIVE,
    SECONDS,
    Integers,
    OneOf,
    drain_setting,
    setting,
)
from app.core.settings.worker import MemberSettings


@dataclass(frozen=True, slots=True)
class EngineAgentSettings(MemberSettings):
    port: int = setting(
        8082, "Port for /health and /metrics; 0 takes a free one.", PORT, heading=COMMON, often=True
    )
    engine_url: str = setting(
        "",
        "Base URL of the engine that runs beside the agent.",
        BASE_URL,
        heading="Engine",
        often=True,
    )
    engines: str = setting(
        "",
        "TOML file of engines to be the agent of, instead of --engine-url; read again when it "
        "changes.",
        often=True,
    )
    engine_dns: str = setting(
        "",
        "NAME:PORT of engines to be the agent of, one at each address that the name has; or a NAME "
        "whose SRV records say where each is.",
        often=True,
    )
    kubernetes_selector: str = setting(
        "",
        "Label selector of the pods whose engines to be the agent of, such as app=vllm.",
        often=True,
    )
    kubernetes_namespace: str = setting(
        "",
        "Namespaces of these pods, separated by commas; unset: that of the agent's own pod, or "
        "else default. Of several, a worker is named NAMESPACE.POD.",
    )
    port_name: str = setting(
        "http", "Port of these pods at which their engines listen: its name, or its number."
    )
    engine_api_key: str = setting("", "API key that the engine asks for, if it does.", often=True)
    address: str = setting(
        "", "Base URL at which clients reach the engine; unset: --engine-url.", BASE_URL, often=True
    )
    engine_kind: str = setting(
        "auto",
        "vllm, sglang, or openai: any other server with that API; auto: ask the engine.",
        OneOf(("auto", "vllm", "sglang", "openai")),
    )
    model: str = setting(
        "", "Ids that requests may name, separated by commas; unset: those that the engine lists."
    )
    kv_transfer: str = setting(
        "",
        "The protocol by which KV travels between this engine and others; unset: by none.",
        OneOf(("", "nixl", "sglang")),
        often=True,
    )
    kv_lease_s: float = setting(
        0.0,
        "Seconds that the engine keeps what waits to be fetched, with --kv-transfer nixl "
        "(kv_lease_duration), where it does not count leases. Else that is found out, and told "
        "where this says something else; 0: not told.",
        SECONDS,
    )
    kv_compatible: str = setting(
        "",
        "A name that all engines have whose KV is right in each other, with --kv-transfer: where "
        "an engine does not tell all that decides it, KV travels between those with one name "
        "alone, and never between two names.",
    )
    revision: str = setting(
        "",
        "Of the engine's model or image. KV travels between engines of one revision alone, as "
        "while a new one is rolled out.",
    )
    side_channel_port: int = setting(
        5600, "The engine's VLLM_NIXL_SIDE_CHANNEL_PORT, with --kv-transfer nixl.", PORT
    )
    kv_host: str = setting(
        "",
        "Host at which others fetch KV, with --kv-transfer nixl, as the engine's "
        "VLLM_NIXL_SIDE_CHANNEL_HOST has it; unset: that of --address.",
    )
    bootstrap_port: int = setting(
        8998, "The engine's --disaggregation-bootstrap-port, with --kv-transfer sglang.", PORT
    )
    events_endpoint: str = setting(
        "",
        "ZMQ address of the KV events of the engine's first rank, the others' ports following; "
        "none: do not listen; unset: ask the engine.",
    )
    replay_endpoint: str = setting(
        "",
        "ZMQ address to request missed events from, of the first rank too; unset: ask the engine.",
    )
    block_size: int | None = setting(
        None,
        "Tokens per block of the index, a divisor of the engine's; unset: the namespace's, or if "
        "that is new, the engine's.",
        Integers(1, 4096),
    )
    engine_block_size: int | None = setting(
        None, "Tokens per block of the engine; unset: ask the engine.", POSITIVE
    )
    capacity_tokens: int | None = setting(
        None, "Tokens that the KV cache of each rank holds; unset: ask the engine.", POSITIVE
    )
    data_parallel_size: int | None = setting(
        None, "Data-parallel ranks of the engine; unset: ask the engine.", Integers(1, 65535)
    )
    stall_s: float = setting(
        30.0,
        "For how long an engine may have requests and compute nothing, besides some times what its "
        "longest prompts and pauses take, before it is out of service; 0: for ever.",
        SECONDS,
    )
    profile: str = setting(
        "",
        "Speed to assume until it is learned; unset: about that of a 70B model on four H100s.",
        OneOf(("", "70b-4xh100", "70b-4xh200", "8b-1xh100")),
    )
    drain_s: float = drain_setting("Worker")
    keep_engine: bool = setting(
        False,
        "On SIGTERM, leave the engine in service: routers look after it until an agent is back. "
        "For agents that are replaced while their engines run.",
        bool,
        often=True,
    )
    memory_folder: str = setting(
        "",
        "Folder that keeps what the agent knows of the engine's cache across restarts of the "
        "agent; "
        "unset: kvroute in the user's cache folder.",
    )
