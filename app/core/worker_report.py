"""What a worker says of itself: what it registers and what it measures, with their text in Redis.

Each field says here all that other code knows of it: the text in Redis, the answers of routers,
`kvroute inspect` and the gauges are made from INFO, METRICS, SPEED and GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import orjson

from app.core.errors import shown
from app.core.keys import DATA_VERSION
from app.core.loads import Load
from app.core.resume import ReuseRule
from app.core.types import WorkerKey

MAX_COUNT = 10**12
"""No number that a worker registers is larger."""
LARGEST = 1e15
"""No measured field's unit is so small that a value could be larger. What is computed from such
values stays finite."""
MAX_CONTEXT = 1 << 21
"""Tokens; no model takes more."""
MAX_NAMES, MAX_NAME = 256, 256
"""Of models or adapters, and characters of each."""
UNKNOWN = "?"
"""What an engine does not tell of its KV."""
GPU_PREFIX = "gpu_"
"""Prefix of the readings' names in the stream and in gauges."""


class Role(StrEnum):
    """What a worker does of a request."""

    BOTH = "both"
    PREFILL = "prefill"
    """It computes prompts for others, and never decodes."""
    DECODE = "decode"
    """It decodes, and never computes prompts for others."""

    @classmethod
    def parse(cls, text: str) -> Role:
        """Raises ValueError."""
        return cls(text)


def as_fingerprint(facts: Mapping[str, str]) -> tuple[str, ...]:
    """What decides whether KV is right elsewhere, by name, as `kv_fingerprint`. An empty value is
    not known."""
    return tuple(f"{name}={value or UNKNOWN}" for name, value in sorted(facts.items()))


def process_of(life: str) -> str:
    """Of an `engine_life`, the part that is the same until its process begins anew."""
    return life.partition("+")[0]


class WrongField(ValueError):
    """A field of a registration that is not what it must be. name: as in Redis."""

    def __init__(self, name: str, value: object, wanted: str) -> None:
        super().__init__(f"{name} is {shown(value)}, not {wanted}")
        self.name, self.value, self.wanted = name, value, wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One field of a report. default: None if there is none."""

    name: str
    annotation: Any
    kind: type[Any]
    """The annotation without None."""
    default: Any
    help: str
    wire: str
    """Its name in Redis."""
    answer: str
    """Its name in GET /v1/workers; "": it is not there."""
    gauge: str
    """Its gauge at routers, without kvroute_worker_; "": it has none."""
    least: int = 0
    text: str = ""
    """How `kvroute inspect worker` shows the value; "": not at all."""
    noun: str = ""
    """What is counted."""
    per: float = 1
    """The unit that `text` shows the value in."""


def _said(help_text: str, default: Any = MISSING, **about: Any) -> Any:
    """A field of a report. about: see Item; by default all names are the field's own."""
    return field(default=default, metadata={"help": help_text, **about})


def _items(cls: type, prefix: str = "", *, gauges: bool = False) -> tuple[Item, ...]:
    """The fields of `cls`. prefix: of their names in Redis and gauges. gauges: all have one."""
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
                **(named | f.metadata),
            )
        )
    return tuple(items)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker reports about itself when it registers; fixed for one incarnation."""

    key: WorkerKey = field(
        metadata={"help": "<worker_id>:<dp_rank>", "wire": "worker", "answer": "", "text": ""}
    )
    address: str = _said("base URL of the worker", text="at {}")
    block_size: int = _said("tokens per block", least=1, text="")
    kv_total_blocks: int = _said("KV blocks on its device", text="{}", noun="block")
    max_requests: int = _said(
        "with so many requests reserved at once the worker is full", text="up to {}", noun="request"
    )
    accelerator: str = _said("its GPU, or cpu", "cpu", text="{}")
    reuse_blocks: int = _said(
        "its engine reuses a prompt's blocks only in whole multiples of so many",
        1,
        least=1,
        text="",
    )
    recomputed_blocks: int = _said(
        "so many last ones of the blocks that it could reuse its engine computes again", 0, text=""
    )
    lookahead_blocks: int = _said(
        "its engine reuses a block only of prompts that go on with so many that follow it there",
        0,
        text="",
    )
    engine: str = _said("its engine and that one's version", "", text="{}")
    models: tuple[str, ...] = _said(
        "names of the model that requests may give", (), text="serves {}"
    )
    adapters: tuple[str, ...] = _said(
        "names of the adapters that it has loaded", (), text="with adapters {}"
    )
    max_model_len: int = _said(
        "tokens that a prompt and its answer may have together; 0: not known",
        0,
        text="",
    )
    tokenizer: str = _said(
        "folder or Hugging Face name of the model's tokenizer; empty: not known", "", text=""
    )
    tokenizer_hash: str = _said(
        "of the ids that its engine gives for a certain text; empty: not known", "", text=""
    )
    publishing: bool = _said(
        "not all that it holds is in the index: Redis lost it, and has yet to be told",
        False,
        text="",
    )
    ill: str = _said(
        "why its agent takes its engine to be ill; empty: it is well", "", text="ill: {}"
    )
    approximate: str = _said(
        "why what it caches is only guessed, from what was routed there; empty: its engine tells",
        "",
        text="approximate: {}",
    )
    role: Role = field(
        default=Role.BOTH, metadata={"help": "both, prefill or decode", "text": "for {}"}
    )
    kv_transfer: str = _said(
        "the protocol by which KV travels between it and other workers; empty: by none", "", text=""
    )
    tp_size: int = _said("shards that its KV heads are split into", 1, least=1, text="")
    kv_lease_s: float = _said(
        "seconds that it keeps KV which waits to be fetched; 0: not known", 0.0, text=""
    )
    engine_life: str = _said(
        "another one once its engine has begun anew, or dropped all KV; empty: not known",
        "",
        answer="",
        text="",
    )
    kv_fingerprint: tuple[str, ...] = _said(
        "what must be equal for its KV to be right in another engine, each as name=value, ? where "
        "its engine does not tell; empty: none of it is known",
        (),
        answer="",
        text="",
    )
    kv_compatible: str = _said(
        "under which name operators say that its KV is right in others; empty: under none",
        "",
        answer="",
        text="",
    )
    revision: str = _said(
        "of its engine: KV travels between engines of one alone; empty: it was not told",
        "",
        answer="",
        text="",
    )
    kv_hosts: tuple[str, ...] = _said(
        "where its KV may be fetched, besides the host of its address", (), answer="", text=""
    )
    bootstrap_port: int = _said(
        "of the bootstrap server at which others meet it, beside SGLang; 0: none",
        0,
        answer="",
        text="",
    )
    host_total_blocks: int = _said(
        "KV blocks that its host tier holds; 0: it has none, or that is not known",
        0,
        answer="",
        text="",
    )
    event_addresses: tuple[str, ...] = _said(
        "where its agent hears KV events, and where it asks for missed ones", (), answer="", text=""
    )

    @property
    def reuse_rule(self) -> ReuseRule:
        """What its engine reuses of blocks that it holds, as far as numbers tell."""
        return ReuseRule(self.reuse_blocks, self.lookahead_blocks, self.recomputed_blocks)

    @property
    def most_tokens(self) -> int:
        """That a prompt and its answer can have together, as far as that is known."""
        room = self.kv_total_blocks * self.block_size or MAX_CONTEXT
        return min(room, self.max_model_len or MAX_CONTEXT, MAX_CONTEXT)


@dataclass(frozen=True, slots=True)
class ForwardPassMetrics:
    """State of an engine after a step. The wire keeps the field's customary names.

    gpu_cache_usage_perc and gpu_prefix_cache_hit_rate are fractions, 0-1, despite the name.
    """

    request_active_slots: int = _said("requests running in the engine", 0, answer="")
    request_total_slots: int = _said("requests that may run at once", 0, answer="")
    kv_active_blocks: int = _said(
        "distinct KV blocks that a worker's running requests use, as it reports",
        0,
        gauge="kv_active_blocks",
    )
    # Answers have what was registered.
    kv_total_blocks: int = _said("KV blocks on its device", 0, answer="")
    num_requests_waiting: int = _said(
        "requests waiting in a worker, as it reports", 0, gauge="requests_waiting"
    )
    gpu_cache_usage_perc: float = _said(
        "share of a worker's KV blocks in use, as it reports; 0-1",
        0.0,
        answer="gpu_cache_usage",
        gauge="cache_usage",
    )
    gpu_prefix_cache_hit_rate: float = _said("share of prompt tokens that was cached; 0-1", 0.0)
    kv_idle_before_evict_s: float = _said(
        "how long recently evicted blocks had gone unused; 0: none was evicted", 0.0
    )
    events_silent_s: float | None = _said(
        "for so long its engine has computed, and its agent has heard no KV events of it",
        None,
        answer="",
    )
    late_s: float = _said(
        "for so long its engine keeps others waiting, for a sign of life or a token",
        0.0,
        gauge="late_seconds",
    )
    kv_leases_ended: int | None = _said(
        "leases on KV for others that ended before all was fetched, since its engine began",
        None,
        answer="",
        gauge="kv_leases_ended",
    )
    kv_fetched_late: int | None = _said(
        "fetches of KV that its engine heard of after their lease had ended, since it began",
        None,
        answer="",
        gauge="kv_fetched_late",
    )
    kv_transfers: int | None = _said(
        "transfers of KV from others to its engine, since that began",
        None,
        answer="",
        gauge="kv_transfers",
    )
    kv_transfers_failed: int | None = _said(
        "of them, those that failed", None, answer="", gauge="kv_transfers_failed"
    )
    engine_steps: int | None = _said(
        "steps of its engine since that began, where KV travels", None, answer=""
    )
    device_blocks: int | None = _said("blocks that it shows on its device", None, answer="")
    host_blocks: int | None = _said("blocks that it shows in host memory", None, answer="")
    disk_blocks: int | None = _said("blocks that it shows on disk", None, answer="")
    reserved_requests: int | None = _said(
        "requests that routers had reserved on it when its engine's were counted", None, answer=""
    )
    reserved_decoding: int | None = _said(
        "those of them that were past their first token", None, answer=""
    )
    reserved_blocks: int | None = _said("KV blocks of their prompts", None, answer="")
    read_s_ago: float | None = _said(
        "for how long its agent had known all this when it reported", None, answer=""
    )
    mean_prefill_tokens: float | None = _said(
        "tokens that its engine computes of a prompt", None, answer=""
    )

    @property
    def num_requests(self) -> int:
        """In the engine, whoever sent them."""
        return self.request_active_slots + self.num_requests_waiting

    def beside(self, *reserved: Load | None) -> ForwardPassMetrics:
        """The same, with the most that routers had reserved while it was counted; None: nobody
        knows."""
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
    """How fast a worker is, in wall-clock seconds, as learned from its own steps.

    The defaults are near a 70B model on four H100s, with a link of 100 Gbit/s. Being off by 40 %
    costs a few percent of TTFT.
    """

    prefill_s_per_token: float = _said("to compute one uncached token", 8.5e-5)
    prefill_s_per_token2: float = _said(
        "per pair of an uncached token and a token it attends to", 1.1e-9
    )
    decode_s_per_kv_token: float = _said(
        "added to every step by each token of KV that decoding requests attend to", 3e-8
    )
    decode_s_per_seq: float = _said("added to every step by each decoding request", 8e-5)
    host_s_per_token: float = _said("to load one token's KV from the host tier", 2e-6)
    disk_s_per_token: float = _said("to load one token's KV from the disk tier", 2e-5)
    mean_output_tokens: float = _said("tokens that a request generates", 300.0)
    transfer_s: float = _said("until the first KV arrives from another worker", 0.01)
    transfer_s_per_token: float = _said("to receive one token's KV from another worker", 2.6e-5)
    decode_s: float = _said("that a step takes which decodes next to nothing", 0.018)


@dataclass(frozen=True, slots=True)
class GpuReadings:
    """What a worker's GPU reports about itself. None: it does not report it, or does not answer."""

    memory_used_bytes: int | None = _said(
        "memory in use on a worker's GPU", None, text="{:,.1f} GiB used", per=2**30
    )
    memory_total_bytes: int | None = _said(
        "memory of a worker's GPU", None, text="{:,.1f} GiB in total", per=2**30
    )
    utilisation: float | None = _said(
        "share of the last moments in which a worker's GPU ran anything; 0-1",
        None,
        text="{:.0f} % busy",
        per=0.01,
    )
    temperature_c: float | None = _said(
        "temperature of a worker's GPU", None, gauge="gpu_temperature_celsius", text="{:.0f} °C"
    )
    power_w: float | None = _said(
        "power draw of a worker's GPU", None, gauge="gpu_power_watts", text="{:.0f} W"
    )
    pcie_sent_bytes_per_s: int | None = _said(
        "rate at which a worker's GPU sends over PCIe, to the host or to another device",
        None,
        gauge="gpu_pcie_sent_bytes_per_second",
        text="{:,.1f} MB/s sent over PCIe",
        per=1e6,
    )
    pcie_received_bytes_per_s: int | None = _said(
        "rate at which a worker's GPU receives over PCIe",
        None,
        gauge="gpu_pcie_received_bytes_per_second",
        text="{:,.1f} MB/s received",
        per=1e6,
    )

    def known(self) -> dict[str, float]:
        """The readings that there are, by name."""
        values = ((item.name, getattr(self, item.name)) for item in GPU)
        return {name: value for name, value in values if value is not None}


INFO = _items(WorkerInfo)
METRICS = _items(ForwardPassMetrics)
SPEED = _items(Speed)
GPU = _items(GpuReadings, GPU_PREFIX, gauges=True)
DEFAULT_SPEED = Speed()
NO_READINGS = GpuReadings()


def encode_info(info: WorkerInfo, lease_ttl_ms: int) -> bytes:
    """JSON: an object with each field of `info`, `lease_ttl_ms`, and the data model's `version`."""
    values = {item.wire: getattr(info, item.name) for item in INFO}
    values |= {"lease_ttl_ms": lease_ttl_ms, "version": DATA_VERSION}
    return orjson.dumps(values, default=WorkerKey.__str__)


def version_in(text: bytes | str) -> int:
    """The version of the data model that the worker speaks which wrote `text`; 1 if that does not
    say. Raises ValueError if nothing of the kind wrote it."""
    values = orjson.loads(text)
    version = values.get("version", 1) if isinstance(values, dict) else None
    if type(version) is not int:
        raise ValueError(f"version is {shown(version)}, not a whole number")
    return version


def decode_info(text: bytes | str) -> WorkerInfo:
    """The WorkerInfo in what `encode_info` wrote. Raises ValueError for anything else."""
    values = orjson.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"not an object: {shown(values)}")
    return read_info(values)


def read_info(values: Mapping[str, Any]) -> WorkerInfo:
    """The WorkerInfo with these fields; a missing field takes its default, an unknown one is
    ignored. Raises WrongField for the first that is bad, or missing without having a default."""
    return WorkerInfo(*(_read(item, values) for item in INFO))


def _read(item: Item, values: Mapping[str, Any]) -> Any:
    value = values.get(item.wire, item.default)
    if item.kind in (int, float):
        if type(value) in (int, item.kind) and item.least <= value <= MAX_COUNT:
            return value
        number = "whole number" if item.kind is int else "number"
        raise WrongField(item.wire, value, f"a {number} from {item.least} to {MAX_COUNT}")
    if item.kind == tuple[str, ...]:
        return _names(item.wire, value)
    if item.kind is bool:
        if type(value) is bool:
            return value
        raise WrongField(item.wire, value, "true or false")
    if not isinstance(value, str):
        raise WrongField(item.wire, value, "text")
    if item.kind is str:
        return value
    try:
        return item.kind.parse(value)
    except ValueError:
        raise WrongField(item.wire, value, item.help) from None


def _names(name: str, value: object) -> tuple[str, ...]:
    if (
        isinstance(value, (list, tuple))
        and len(value) <= MAX_NAMES
        and all(isinstance(one, str) and 0 < len(one) <= MAX_NAME for one in value)
        and all(one.isprintable() for one in value)
    ):
        return tuple(value)
    wanted = f"at most {MAX_NAMES} names of 1 to {MAX_NAME} printable characters"
    raise WrongField(name, value, wanted)


def encode(
    metrics: ForwardPassMetrics, speed: Speed, gpu: GpuReadings = NO_READINGS
) -> dict[str, str]:
    """Fields of the metrics stream: one per field of each class that is not None, numbers as short
    text."""
    return {
        item.wire: str(value) if isinstance(value, int) else f"{value:.9g}"
        for items, report in ((METRICS, metrics), (SPEED, speed), (GPU, gpu))
        for item in items
        if (value := getattr(report, item.name)) is not None
    }


def decode(
    entry: Mapping[bytes, bytes],
) -> tuple[ForwardPassMetrics, Speed, GpuReadings]:
    """Inverse of `encode`; a missing field takes its default, an unknown one is ignored.

    Raises ValueError, naming the field, if one is not a number from 0 to LARGEST.
    """
    return (
        ForwardPassMetrics(*_numbers(entry, _OF_METRICS)),
        Speed(*_numbers(entry, _OF_SPEED)),
        GpuReadings(*_numbers(entry, _OF_GPU)),
    )


_Table = list[tuple[bytes, type[Any], Any]]


def _table(items: tuple[Item, ...]) -> _Table:
    """For each of `items`, its name in the stream, its kind and its default."""
    return [(item.wire.encode(), item.kind, item.default) for item in items]


# Every router decodes every entry, up to thousands in a second.
_OF_METRICS = _table(METRICS)
_OF_SPEED = _table(SPEED)
_OF_GPU = _table(GPU)


def _numbers(entry: Mapping[bytes, bytes], table: _Table) -> list[Any]:
    values = []
    for name, kind, value in table:
        text = entry.get(name)
        if text is not None:
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if not 0 <= value <= LARGEST:
                raise ValueError(f"{name.decode()} is {text.decode(errors='replace')}")
            value = kind(value)
        values.append(value)
    return values
