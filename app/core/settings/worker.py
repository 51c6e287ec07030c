"""Settings of a worker, and those that it shares with agents beside other engines."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from app.core.errors import ConfigError
from app.core.settings.kinds import (
    BASE_URL,
    COMMON,
    COUNT,
    FACTOR,
    PORT,
    POSITIVE,
    POSITIVE_SECONDS,
    CommonSettings,
    Integers,
    OneOf,
    base_url,
    drain_setting,
    setting,
)
from app.core.types import WORKER_ID


@dataclass(frozen=True, slots=True)
class MemberSettings(CommonSettings):
    """Settings of all processes that register workers."""

    worker_id: str = setting(
        "", "Name in the fleet; unset: the host name.", heading="Worker", often=True
    )
    role: str = setting(
        "both",
        "prefill: computes prompts for other workers, and never decodes; decode: computes no "
        "prompts for others; both.",
        OneOf(("both", "prefill", "decode")),
        often=True,
    )
    max_requests: int = setting(
        256,
        "Requests that may be reserved on the worker at once; then it is full.",
        Integers(1, 1_000_000),
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
        Integers(1, 1024),
    )

    def resolved_id(self) -> str:
        return self.worker_id or socket.gethostname()

    def check_member(self, kv_transfer: str) -> None:
        """Raises ConfigError for a bad name, or if the role needs KV to travel and none can."""
        if not WORKER_ID.fullmatch(self.resolved_id()):
            raise ConfigError(
                f"worker_id {self.resolved_id()!r}: 1-253 letters, digits and . _ - are allowed"
            )
        if self.role != "both" and not kv_transfer:
            raise ConfigError(
                f"--role {self.role}: needs --kv-transfer, as KV has to travel for it"
            )


@dataclass(frozen=True, slots=True)
class WorkerSettings(MemberSettings):
    """Settings of one worker: an agent and the engine it hosts."""

    port: int = setting(
        8081, "Port to listen on; 0 takes a free one.", PORT, heading=COMMON, often=True
    )
    dp_rank: int = setting(0, "Data-parallel rank.", Integers(0, 65535), heading="Worker")
    address: str = setting(
        "",
        "Base URL at which clients reach the worker; unset: http://<host>:<port>, with the host "
        "name in place of 0.0.0.0 or ::.",
        BASE_URL,
        often=True,
    )
    # At most what fits into the pool of any worker whose pool size is not given.
    block_size: int = setting(16, "Tokens per KV block.", Integers(1, 4096), heading="Engine")
    engine: str = setting(
        "sim", "sim: simulated; torch: computes a Llama model.", OneOf(("sim", "torch")), often=True
    )
    kv_transfer: str = setting(
        "",
        "kvroute: hand KV on to workers with the same model and flag, and fetch theirs; unset: do "
        "not.",
        OneOf(("", "kvroute")),
        often=True,
    )
    kv_port: int = setting(
        0,
        "Port from which others fetch KV, with --kv-transfer; 0 takes a free one. Who fetches has "
        "to prove that it has --worker-key; without one, to name an id that nobody guesses.",
        PORT,
    )
    kv_pool_tokens: int | None = setting(
        None,
        "Size of the device KV pool in tokens; unset: the profile's (sim) or 1 GiB (torch).",
        POSITIVE,
        often=True,
    )
    host_pool_tokens: int = setting(0, "Size of the host KV pool in tokens.", COUNT, often=True)
    profile: str = setting(
        "70b-4xh100",
        "Timing of the simulated engine: 70b-4xh100, 70b-4xh200 or 8b-1xh100.",
        often=True,
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
        often=True,
    )
    model_name: str = setting(
        "",
        "Names by which requests may ask for the model, separated by commas; unset: --profile's "
        "(sim) or --model's (torch).",
        often=True,
    )
    worker_key: str = setting(
        "",
        "Key that every request to the worker must carry, except for /health.",
        heading="Access",
        often=True,
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
        Integers(1, 1024),
    )
    tp_size: int = setting(
        1,
        "Shards that the torch engine's KV heads are split into, each with pools of its own; on as "
        "many GPUs, if there are and --device names none.",
        Integers(1, 1024),
    )
    prefill_chunk: int | None = setting(
        None,
        "Prompt tokens the torch engine computes at a time; prefix reuse is in multiples of it. "
        "Unset: 256 on a CPU, 1024 on a GPU.",
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
    drain_s: float = drain_setting("Worker")

    def model_names(self, default: str) -> tuple[str, ...]:
        return tuple(filter(None, map(str.strip, self.model_name.split(",")))) or (default,)

    def resolved_address(self) -> str:
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104
        return self.address or base_url(host, self.port)
