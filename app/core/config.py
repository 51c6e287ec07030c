"""Settings of each process: one frozen dataclass, built once from flags, KVROUTE_* and REDIS_URL.

Those of the planner are in planner_settings.py.
"""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

from app.core.door_settings import DoorSettings
from app.core.errors import ConfigError
from app.core.settings import (
    BASE_URL,
    COMMON,
    COUNT,
    FACTOR,
    PORT,
    POSITIVE,
    POSITIVE_SECONDS,
    SECONDS,
    SEED,
    WEIGHTS,
    CommonSettings,
    OneOf,
    PolicyName,
    Real,
    Whole,
    base_url,
    setting,
)


@dataclass(frozen=True, slots=True)
class RouterSettings(DoorSettings):
    """One router replica."""

    port: int = setting(8080, "Port to listen on; 0 takes a free one.", PORT, heading=COMMON)
    policy: str = setting(
        "latency", "Cost function for requests that name none.", PolicyName(), heading="Decisions"
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
        Whole(1, 600_000),
        heading="Redis",
    )
    read_from: str = setting(
        "master",
        "Where to look up overlap. Replicas (of Sentinel or a Cluster) take load off the masters "
        "but lag slightly behind.",
        OneOf(("master", "replica")),
    )
    kv_events: bool = setting(
        True,
        "Whether workers publish what they cache. If not, blocks routed to a worker count as "
        "cached there for --prediction-ttl-s after their last use.",
        bool,
        heading="What workers cache",
    )
    count_in_flight: bool = setting(
        False,
        "Even with KV events, count blocks routed to a worker within the last --prediction-ttl-s "
        "as cached there.",
        bool,
    )
    prediction_ttl_s: float = setting(
        120.0, "How long blocks routed to a worker count as cached there.", POSITIVE_SECONDS
    )
    prediction_entries: int = setting(
        262_144,
        "Maximum number of routed blocks recorded in each shard; past it, the oldest fifth is "
        "dropped.",
        POSITIVE,
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
    wait_queue: int = setting(
        0,
        "Requests that may wait at this replica while no worker can take them; 0: they are refused "
        "(429).",
        Whole(0, 4096),
        heading="Waiting",
    )
    wait_above_s: float | None = setting(
        None,
        "With --wait-queue, requests wait, or are refused, while every worker's prefill queue is "
        "predicted to last longer than this; unset: while all workers are at --max-requests.",
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
    )
    kv_lease_s: float = setting(
        30.0,
        "How long a source keeps blocks that wait to be fetched, in seconds: as its engine is set "
        "(vLLM: kv_lease_duration). Of a worker that says less, what it says.",
        POSITIVE_SECONDS,
    )
    strict_roles: bool = setting(
        False,
        "Workers with the role decode compute no prompts, not even where that is the quickest.",
        bool,
    )
    session_ttl_s: float = setting(
        600.0,
        "How long to remember which worker a session last went to.",
        POSITIVE_SECONDS,
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "Larger request bodies are refused (413).", POSITIVE, heading="Limits"
    )
    max_prompt_tokens: int = setting(1_048_576, "Longer prompts are refused (422).", POSITIVE)
    shared_fd: int | None = setting(
        None,
        "An inherited listening socket to serve as well, shared with other replicas.",
        Whole(0, 2**31 - 1),
        heading=COMMON,
    )

    @property
    def max_queue_s(self) -> float:
        """The longest queue of a worker that takes requests, seconds; infinite unless requests may
        wait for it to shorten and --wait-above-s is set."""
        return math.inf if self.wait_above_s is None or not self.wait_queue else self.wait_above_s


@dataclass(frozen=True, slots=True)
class MemberSettings(CommonSettings):
    """What all that register workers share."""

    worker_id: str = setting("", "Name in the fleet; unset: the host name.", heading="Worker")
    role: str = setting(
        "both",
        "prefill: computes prompts for other workers, and never decodes; decode: computes no "
        "prompts for others; both.",
        OneOf(("both", "prefill", "decode")),
    )
    max_requests: int = setting(
        256,
        "Requests that may be reserved on the worker at once; then it is full.",
        Whole(1, 1_000_000),
    )
    lease_ttl_s: float = setting(
        3.0, "How long the worker is routed to after its last heartbeat.", POSITIVE_SECONDS
    )
    index_blocks: int | None = setting(
        None,
        "Unique blocks that the namespace's index is sized for, set by the first worker to "
        "register; "
        "unset: 16 times this worker's pool.",
        POSITIVE,
        heading="Index",
    )
    index_shards: int = setting(
        1,
        "Shards of the namespace's index, set by the first worker to register.",
        Whole(1, 1024),
    )

    def resolved_id(self) -> str:
        return self.worker_id or socket.gethostname()

    def check_role(self, kv_transfer: str) -> None:
        """Raises ConfigError if no KV can travel, as the role needs."""
        if self.role != "both" and not kv_transfer:
            raise ConfigError(
                f"--role {self.role}: needs --kv-transfer, as KV has to travel for it"
            )


@dataclass(frozen=True, slots=True)
class WorkerSettings(MemberSettings):
    """One worker: an agent and the engine it hosts."""

    port: int = setting(8081, "Port to listen on; 0 takes a free one.", PORT, heading=COMMON)
    dp_rank: int = setting(0, "Data-parallel rank.", Whole(0, 65535), heading="Worker")
    address: str = setting(
        "",
        "Base URL at which clients reach the worker; unset: http://<host>:<port>, with the host "
        "name in place of 0.0.0.0 or ::.",
        BASE_URL,
    )
    # At most what fits into the pool of any worker whose pool size is not given.
    block_size: int = setting(16, "Tokens per KV block.", Whole(1, 4096), heading="Engine")
    engine: str = setting(
        "sim", "sim: simulated; torch: computes a Llama model.", OneOf(("sim", "torch"))
    )
    kv_transfer: str = setting(
        "",
        "kvroute: hand KV on to workers with the same model and flag, and fetch theirs; unset: do "
        "not.",
        OneOf(("", "kvroute")),
    )
    kv_port: int = setting(
        0,
        "Port from which others fetch KV, with --kv-transfer; 0 takes a free one. Whoever reaches "
        "it can read what it is told the id of: keep it within the cluster.",
        PORT,
    )
    kv_pool_tokens: int | None = setting(
        None,
        "Size of the device KV pool in tokens; unset: the profile's (sim) or 1 GiB (torch).",
        POSITIVE,
    )
    host_pool_tokens: int = setting(0, "Size of the host KV pool in tokens.", COUNT)
    profile: str = setting(
        "70b-4xh100", "Timing of the simulated engine: 70b-4xh100, 70b-4xh200 or 8b-1xh100."
    )
    speedup: float = setting(
        1.0, "Run the simulated engine this many times faster than real time.", FACTOR
    )
    link_gbit: float = setting(
        100.0, "Gbit/s at which KV leaves the simulated engine, with --kv-transfer.", FACTOR
    )
    model: str = setting(
        "40m",
        "Model of the torch engine: a folder with a Hugging Face Llama checkpoint, or a size that "
        "gets random weights (tiny, 40m, 125m, llama-3.2-1b or llama-3.1-8b).",
    )
    model_name: str = setting(
        "",
        "Names by which requests may ask for the model, separated by commas; unset: --profile's "
        "(sim) or --model's (torch).",
    )
    worker_key: str = setting(
        "", "Key that every request to the worker must carry, except for /health.", heading="Access"
    )
    metrics_key: str = setting(
        "", "Key that opens /metrics and nothing else. Once there is one, /metrics needs a key."
    )
    device: str = setting(
        "auto",
        "Device of the torch engine: cpu, cuda or cuda:N; auto: a GPU if there is one.",
        heading="Torch engine",
    )
    dtype: str = setting(
        "auto",
        "Type of the torch engine's weights and KV; auto: bfloat16 on a GPU, else float32.",
        OneOf(("auto", "float32", "bfloat16", "float16")),
    )
    threads: int | None = setting(
        None,
        "Threads the torch engine computes with on a CPU; unset: all cores.",
        Whole(1, 1024),
    )
    tp_size: int = setting(
        1,
        "Shards that the torch engine's KV heads are split into, each with pools of its own; on as "
        "many GPUs, if there are and --device names none.",
        Whole(1, 1024),
    )
    prefill_chunk: int = setting(
        256,
        "Prompt tokens the torch engine computes at a time; prefix reuse is in multiples of it.",
        POSITIVE,
    )
    max_num_seqs: int = setting(
        64, "Maximum number of requests the torch engine runs at once.", POSITIVE
    )
    disk_pool_tokens: int = setting(
        0, "Size of the torch engine's disk KV pool in tokens.", COUNT, heading="Torch engine"
    )
    disk_folder: str = setting(
        "", "Folder of the disk KV pool; each worker has its own folder in it."
    )
    write_policy: str = setting(
        "back",
        "When the torch engine stores blocks in the next slower tier: when they are evicted (back) "
        "or as soon as they are filled (through).",
        OneOf(("back", "through")),
    )
    store_min_uses: int = setting(
        1,
        "Requests that must have used a block before the torch engine stores it in a slower tier.",
        POSITIVE,
    )
    publish_events: str = setting(
        "",
        "vllm: the engine publishes its KV events and metrics as vLLM does, for `kvroute agent`; "
        "empty: the worker registers itself in Redis.",
        OneOf(("", "vllm")),
        heading="Publishing as vLLM",
    )
    events_port: int = setting(
        0, "Port for published KV events (ZeroMQ); 0 takes a free one.", PORT
    )
    replay_port: int = setting(
        0, "Port to ask for published KV events again (ZeroMQ); 0 takes a free one.", PORT
    )
    drain_s: float = setting(
        2.0,
        "On SIGTERM, how long a worker waits for the requests routed to it, and then for the "
        "answers under way.",
        SECONDS,
        heading="Worker",
    )

    def model_names(self, default: str) -> tuple[str, ...]:
        return tuple(filter(None, map(str.strip, self.model_name.split(",")))) or (default,)

    def resolved_address(self) -> str:
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104
        return self.address or base_url(host, self.port)


@dataclass(frozen=True, slots=True)
class EngineAgentSettings(MemberSettings):
    """One agent beside an engine of another make."""

    port: int = setting(
        8082, "Port for /health and /metrics; 0 takes a free one.", PORT, heading=COMMON
    )
    engine_url: str = setting(
        "", "Base URL of the engine that runs beside the agent.", BASE_URL, heading="Engine"
    )
    engine_api_key: str = setting("", "API key that the engine asks for, if it does.")
    address: str = setting(
        "", "Base URL at which clients reach the engine; unset: --engine-url.", BASE_URL
    )
    engine_kind: str = setting(
        "auto", "vllm or sglang; auto: ask the engine.", OneOf(("auto", "vllm", "sglang"))
    )
    model: str = setting(
        "", "Ids that requests may name, separated by commas; unset: those that the engine lists."
    )
    kv_transfer: str = setting(
        "",
        "The way in which KV travels between this engine and others; unset: in none.",
        OneOf(("", "nixl", "sglang")),
    )
    kv_lease_s: float = setting(
        0.0,
        "Seconds that the engine keeps what waits to be fetched, as it is set, with --kv-transfer "
        "nixl: kv_lease_duration; 0: not told.",
        SECONDS,
    )
    bootstrap_port: int = setting(
        8998, "The engine's --disaggregation-bootstrap-port, with --kv-transfer sglang.", PORT
    )
    events_endpoint: str = setting(
        "",
        "ZMQ address of the KV events of the engine's first rank, the others' ports following; "
        "unset: ask the engine.",
    )
    replay_endpoint: str = setting(
        "",
        "ZMQ address to request missed events from, of the first rank too; unset: ask the engine.",
    )
    block_size: int | None = setting(
        None,
        "Tokens per block of the index, a divisor of the engine's; unset: the namespace's, or if "
        "that is new, the engine's.",
        Whole(1, 4096),
    )
    engine_block_size: int | None = setting(
        None, "Tokens per block of the engine; unset: ask the engine.", POSITIVE
    )
    capacity_tokens: int | None = setting(
        None, "Tokens that the KV cache of each rank holds; unset: ask the engine.", POSITIVE
    )
    data_parallel_size: int | None = setting(
        None, "Data-parallel ranks of the engine; unset: ask the engine.", Whole(1, 65535)
    )
    profile: str = setting(
        "",
        "Speed to assume until it is learned: 70b-4xh100, 70b-4xh200 or 8b-1xh100; unset: about "
        "that of the first.",
    )
    drain_s: float = setting(
        30.0,
        "On SIGTERM, how long an agent waits for its engine's requests to end; no more are "
        "routed there.",
        SECONDS,
        heading="Worker",
    )
    memory_folder: str = setting(
        "",
        "Folder that keeps what the agent knows of the engine's cache across restarts of the "
        "agent; "
        "unset: kvroute in the user's cache folder.",
    )
