"""Reports of workers: what they register and what they measure.

Each field says here all that other code knows of it: the text in Redis, the answers of routers,
`kvroute inspect` and the gauges are made from INFO, METRICS, SPEED and GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from app.core.loads import Load
from app.core.overlaps import NO_BLOCK, ReuseRule
from app.core.roles import Role
from app.core.trust import Trust
from app.core.types import WorkerKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One field of a report. default: None if there is none."""

    name: str
    annotation: Any
    kind: type[Any]
    default: Any
    help: str
    wire: str
    answer: str
    """Name in GET /v1/workers; "": absent."""
    gauge: str
    """Gauge at routers, without kvroute_worker_; "": none."""
    least: int = 0
    text: str = ""
    """Format of the value in `kvroute inspect worker`; "": not shown."""
    noun: str = ""
    per: float = 1
    """Unit in which `text` shows the value."""


def said(help_text: str, default: Any = MISSING, **about: Any) -> Any:
    """Returns a dataclass field of a report. about: members of Item; names default to the field's
    own."""
    return field(default=default, metadata={"help": help_text, **about})


def items_of(
    cls: type, prefix: str = "", *, gauges: bool = False, **usual: str
) -> tuple[Item, ...]:
    """Returns the fields of `cls`. prefix: of names in Redis and gauges. gauges: all have one.
    usual: members of Item, for fields that do not say them."""
    hints = get_type_hints(cls)
    items = []
    for f in fields(cls):
        optional = get_origin(hints[f.name]) is UnionType
        kinds = [kind for kind in get_args(hints[f.name]) if kind is not NoneType and optional]
        named: dict[str, Any] = {
            "wire": prefix + f.name,
            "answer": f.name,
            "gauge": prefix + f.name if gauges else "",
            "text": f"{f.name} {{}}",
        }
        [kind] = kinds or [hints[f.name]]
        items.append(
            Item(
                name=f.name,
                annotation=hints[f.name],
                kind=kind,
                default=None if f.default is MISSING else f.default,
                **(named | usual | f.metadata),
            )
        )
    return tuple(items)


MAX_CONTEXT = 1 << 21
UNKNOWN = "?"
"""Value of a fact that an engine does not tell of its KV."""
GPU_PREFIX = "gpu_"


def as_fingerprint(facts: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the facts that decide whether KV is right elsewhere, as `kv_fingerprint`. An empty
    value is not known."""
    return tuple(f"{name}={value or UNKNOWN}" for name, value in sorted(facts.items()))


def process_of(life: str) -> str:
    """Returns the part of an `engine_life` that stays until the engine's process begins anew."""
    return life.partition("+")[0]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Registration of a worker; fixed for one incarnation."""

    key: WorkerKey = field(
        metadata={"help": "<worker_id>:<dp_rank>", "wire": "worker", "answer": ""}
    )
    address: str = said("base URL of the worker", text="at {}")
    block_size: int = said("tokens per block", least=1)
    kv_total_blocks: int = said("KV blocks on its device", text="{}", noun="block")
    max_requests: int = said(
        "with so many requests reserved at once the worker is full", text="up to {}", noun="request"
    )
    accelerator: str = said("its GPU, or cpu", "cpu", text="{}")
    reuse_blocks: int = said(
        "its engine reuses a prompt's blocks only in whole multiples of so many", 1, least=1
    )
    recomputed_blocks: int = said(
        "so many last ones of the blocks that it could reuse its engine computes again", 0
    )
    lookahead_blocks: int = said(
        "its engine reuses a block only of prompts that go on with so many that follow it there", 0
    )
    chunk_blocks: int = said(
        "its engine reads what lies in other tiers than its device only in whole multiples of so "
        "many blocks of a prompt",
        1,
        least=1,
    )
    engine: str = said("its engine and that one's version", "", text="{}")
    models: tuple[str, ...] = said(
        "names of the model that requests may give", (), text="serves {}"
    )
    adapters: tuple[str, ...] = said(
        "names of the adapters that it has loaded", (), text="with adapters {}"
    )
    max_model_len: int = said(
        "tokens that a prompt and its answer may have together; 0: not known", 0
    )
    tokenizer: str = said(
        "folder or Hugging Face name of the model's tokenizer; empty: not known", ""
    )
    tokenizer_hash: str = said(
        "of the ids that its engine gives for a certain text; empty: not known", ""
    )
    ill: str = said(
        "why its agent takes its engine to be ill; empty: it is well", "", text="ill: {}"
    )
    trust: Trust = field(
        default=Trust.EXACT,
        metadata={
            "help": "how far what the index says of it can be relied on: exact; bound: it may hold "
            "more; approximate: what was routed there counts too; load_only: it caches no prefixes",
            "text": "{}",
        },
    )
    trust_cause: str = said("why not further; empty: it is exact", "", text="{}")
    findings: tuple[str, ...] = said(
        "what is wrong with what it, its engine or its agent says; it gets requests all the same",
        (),
        text="with findings: {}",
    )
    role: Role = field(
        default=Role.BOTH, metadata={"help": "both, prefill or decode", "text": "for {}"}
    )
    kv_transfer: str = said(
        "the protocol by which KV travels between it and other workers; empty: by none", ""
    )
    tp_size: int = said("shards that its KV heads are split into", 1, least=1)
    kv_lease_s: float = said(
        "seconds that it keeps KV which waits to be fetched; 0: not known", 0.0
    )
    engine_life: str = said(
        "another one once its engine has begun anew, or dropped all KV; empty: not known",
        "",
        answer="",
    )
    engine_id: str = said(
        "which rank of which engine it is: another worker of the same one gets no requests; empty: "
        "not known",
        "",
        answer="",
    )
    kv_fingerprint: tuple[str, ...] = said(
        "what must be equal for its KV to be right in another engine, each as name=value, ? where "
        "its engine does not tell; empty: none of it is known",
        (),
        answer="",
    )
    kv_compatible: str = said(
        "under which name operators say that its KV is right in others; empty: under none",
        "",
        answer="",
    )
    revision: str = said(
        "of its engine: KV travels between engines of one alone; empty: it was not told",
        "",
        answer="",
    )
    kv_hosts: tuple[str, ...] = said(
        "where its KV may be fetched, besides the host of its address", (), answer=""
    )
    bootstrap_port: int = said(
        "of the bootstrap server at which others meet it, beside SGLang; 0: none", 0, answer=""
    )
    host_total_blocks: int = said(
        "KV blocks that its host tier holds; 0: it has none, or that is not known", 0, answer=""
    )
    event_addresses: tuple[str, ...] = said(
        "where its agent hears KV events, and where it asks for missed ones", (), answer=""
    )

    @property
    def reuse_rule(self) -> ReuseRule:
        """Rule of what the engine reuses of the blocks it holds, as far as numbers tell."""
        if self.trust is Trust.LOAD_ONLY:
            return NO_BLOCK
        numbers = (self.reuse_blocks, self.lookahead_blocks, self.recomputed_blocks)
        return ReuseRule(*numbers, self.chunk_blocks)

    @property
    def most_tokens(self) -> int:
        """Tokens that a prompt and its answer can have together, as far as that is known."""
        room = self.kv_total_blocks * self.block_size or MAX_CONTEXT
        return min(room, self.max_model_len or MAX_CONTEXT, MAX_CONTEXT)


@dataclass(frozen=True, slots=True)
class ForwardPassMetrics:
    """State of an engine after a step. The wire keeps the field's customary names.
    gpu_cache_usage_perc and gpu_prefix_cache_hit_rate are fractions, 0-1, despite the name."""

    request_active_slots: int = said("requests running in the engine", 0)
    request_total_slots: int = said("requests that may run at once", 0)
    kv_active_blocks: int = said(
        "distinct KV blocks that a worker's running requests use, as it reports",
        0,
        gauge="kv_active_blocks",
        answer="kv_active_blocks",
    )
    # Answers have what was registered.
    kv_total_blocks: int = said("KV blocks on its device", 0)
    num_requests_waiting: int = said(
        "requests waiting in a worker, as it reports",
        0,
        gauge="requests_waiting",
        answer="num_requests_waiting",
    )
    gpu_cache_usage_perc: float = said(
        "share of a worker's KV blocks in use, as it reports; 0-1",
        0.0,
        answer="gpu_cache_usage",
        gauge="cache_usage",
    )
    gpu_prefix_cache_hit_rate: float = said(
        "share of prompt tokens that was cached; 0-1", 0.0, answer="gpu_prefix_cache_hit_rate"
    )
    kv_idle_before_evict_s: float = said(
        "how long recently evicted blocks had gone unused; 0: none was evicted",
        0.0,
        answer="kv_idle_before_evict_s",
    )
    late_s: float = said(
        "for so long its engine keeps others waiting, for a sign of life or a token",
        0.0,
        gauge="late_seconds",
        answer="late_s",
    )
    kv_leases_ended: int | None = said(
        "leases on KV for others that ended before all was fetched, since its engine began",
        None,
        gauge="kv_leases_ended",
    )
    kv_fetched_late: int | None = said(
        "fetches of KV that its engine heard of after their lease had ended, since it began",
        None,
        gauge="kv_fetched_late",
    )
    kv_transfers: int | None = said(
        "transfers of KV from others to its engine, since that began", None, gauge="kv_transfers"
    )
    kv_transfers_failed: int | None = said(
        "of them, those that failed", None, gauge="kv_transfers_failed"
    )
    engine_steps: int | None = said("steps of its engine since that began, where KV travels", None)
    device_blocks: int | None = said("blocks that it shows on its device", None)
    host_blocks: int | None = said("blocks that it shows in host memory", None)
    disk_blocks: int | None = said("blocks that it shows on disk", None)
    reserved_requests: int | None = said(
        "requests that routers had reserved on it when its engine's were counted", None
    )
    reserved_decoding: int | None = said("those of them that were past their first token", None)
    reserved_blocks: int | None = said("KV blocks of their prompts", None)
    read_s_ago: float | None = said(
        "for how long its agent had known all this when it reported", None
    )
    mean_prefill_tokens: float | None = said("tokens that its engine computes of a prompt", None)

    @property
    def num_requests(self) -> int:
        """Requests in the engine, whoever sent them."""
        return self.request_active_slots + self.num_requests_waiting

    def beside(self, *reserved: Load | None) -> ForwardPassMetrics:
        """Returns the metrics with the largest of these reservations, which routers held while the
        engine was counted; unchanged if one is not known."""
        loads = [load for load in reserved if load is not None]
        if len(loads) < len(reserved):
            return self
        return replace(
            self,
            reserved_requests=max(load.requests for load in loads),
            reserved_decoding=min(load.decoding for load in loads),
            reserved_blocks=max(load.blocks for load in loads),
        )


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a worker, in wall-clock seconds, as learned from its own steps. The defaults are
    near a 70B model on four H100s, with a link of 100 Gbit/s. Being off by 40 % costs a few percent
    of TTFT."""

    prefill_s_per_token: float = said("to compute one uncached token", 8.5e-5)
    prefill_s_per_token2: float = said(
        "per pair of an uncached token and a token it attends to", 1.1e-9
    )
    decode_s_per_kv_token: float = said(
        "added to every step by each token of KV that decoding requests attend to", 3e-8
    )
    decode_s_per_seq: float = said("added to every step by each decoding request", 8e-5)
    host_s_per_token: float = said("to load one token's KV from the host tier", 2e-6)
    disk_s_per_token: float = said("to load one token's KV from the disk tier", 2e-5)
    mean_output_tokens: float = said("tokens that a request generates", 300.0)
    transfer_s: float = said("until the first KV arrives from another worker", 0.01)
    transfer_s_per_token: float = said("to receive one token's KV from another worker", 2.6e-5)
    decode_s: float = said("that a step takes which decodes next to nothing", 0.018)


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """Readings of a worker's GPU. None: the GPU does not report it, or does not answer."""

    memory_used_bytes: int | None = said(
        "memory in use on a worker's GPU", None, text="{:,.1f} GiB used", per=2**30
    )
    memory_total_bytes: int | None = said(
        "memory of a worker's GPU", None, text="{:,.1f} GiB in total", per=2**30
    )
    utilisation: float | None = said(
        "share of the last moments in which a worker's GPU ran anything; 0-1",
        None,
        text="{:.0f} % busy",
        per=0.01,
    )
    temperature_c: float | None = said(
        "temperature of a worker's GPU", None, gauge="gpu_temperature_celsius", text="{:.0f} °C"
    )
    power_w: float | None = said(
        "power draw of a worker's GPU", None, gauge="gpu_power_watts", text="{:.0f} W"
    )
    pcie_sent_bytes_per_s: int | None = said(
        "rate at which a worker's GPU sends over PCIe, to the host or to another device",
        None,
        gauge="gpu_pcie_sent_bytes_per_second",
        text="{:,.1f} MB/s sent over PCIe",
        per=1e6,
    )
    pcie_received_bytes_per_s: int | None = said(
        "rate at which a worker's GPU receives over PCIe",
        None,
        gauge="gpu_pcie_received_bytes_per_second",
        text="{:,.1f} MB/s received",
        per=1e6,
    )

    def known(self) -> dict[str, float]:
        values = ((item.name, getattr(self, item.name)) for item in GPU)
        return {name: value for name, value in values if value is not None}


INFO = items_of(WorkerInfo, text="")
METRICS = items_of(ForwardPassMetrics, answer="")
SPEED = items_of(Speed)
GPU = items_of(GpuReadings, GPU_PREFIX, gauges=True)
DEFAULT_SPEED = Speed()
NO_READINGS = GpuReadings()
