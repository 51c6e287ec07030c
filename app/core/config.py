"""Settings of each process: one frozen dataclass, built once from flags, KVROUTE_* and REDIS_URL.

`options` makes a command-line option of every field, so that its flag, its variable, its default
and its help stand in one place. Nothing else reads the environment.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from app.core.errors import KvrouteError

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="CommonSettings")

POLICY_NAMES = (
    "latency",
    "blocks",
    "balance",
    "logit",
    "least_loaded",
    "power_of_two",
    "round_robin",
    "random",
)
PRIORITIES = ("high", "normal", "low")
LOG_LEVELS = ("debug", "info", "warning", "error")


class Number(click.FloatRange):
    """A number in a range. `nan`, which a comparison with a bound lets pass, is none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is no number", param, ctx)
        return number


MOST = 10**12
"""Of whatever is counted: exact as a double, which is what Lua counts in."""
LONGEST_S = 10 * 365 * 24 * 3600

PORT = click.IntRange(0, 65535)
SEED = click.IntRange(0, 2**64 - 1)
COUNT = click.IntRange(0, MOST)
POSITIVE = click.IntRange(1, MOST)
PROCESSES = click.IntRange(1, 1024)
SECONDS = Number(0, LONGEST_S)
# Redis counts milliseconds: what rounds to none of them would be over at once.
POSITIVE_SECONDS = Number(0.001, LONGEST_S)
FACTOR = Number(0.001, 1_000_000)


def parse_weights(text: str) -> dict[str, float]:
    """Tenant -> weight, of `a=4,b=0.5`. Raises ValueError for what is none."""
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, weight = part.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = math.nan
        if not name or not 0.001 <= weights[name] <= 1000:
            raise ValueError("a name and a weight from 0.001 to 1000 are wanted for each")
    return weights


class _Weights(click.ParamType[str]):
    """Text that `parse_weights` reads."""

    name = "NAME=WEIGHT,..."

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        try:
            parse_weights(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        return str(value)


class _BaseUrl(click.ParamType[str]):
    """Nothing, or an http(s) URL that names a host and that a path can be added to."""

    name = "URL"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if value and not _is_base_url(value):
            self.fail(f"{value!r} is no http:// or https:// URL of a host", param, ctx)
        return str(value)


def _is_base_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        has_host = bool(url.hostname) and url.port != 0
    except ValueError:
        return False
    return has_host and url.scheme in ("http", "https") and not url.query and not url.fragment


def base_url(host: str, port: int) -> str:
    """Of what listens there; an IPv6 address goes in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Command(click.Command):
    """Shows our own errors as one line, not as a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        error: BaseException
        try:
            return super().invoke(ctx)
        except* KvrouteError as group:
            error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        # Out here, as the first releases of Python 3.11 wrap what is raised in an except* clause.
        raise click.ClickException(str(error))


def setting(default: Any, help_text: str, kind: Any = None, env: str | None = None) -> Any:
    """A dataclass field that `options` can show. env: its variable, if not KVROUTE_<NAME>."""
    return field(default=default, metadata={"help": help_text, "kind": kind, "env": env})


def variable(f: Field[Any]) -> str:
    """The environment variable of a field made by `setting`."""
    env: str = f.metadata["env"] or f"KVROUTE_{f.name.upper()}"
    return env


def options(cls: type, *, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Adds a click option for every field of `cls` to a command, but for those in `without`."""

    def decorate(command: F) -> F:
        for f in reversed(fields(cls)):
            if f.name not in without:
                command = click.option(
                    _spelt(f),
                    f.name,
                    default=None if f.default is MISSING else f.default,
                    type=f.metadata["kind"],
                    envvar=variable(f),
                    show_default=True,
                    show_envvar=True,
                    help=f.metadata["help"],
                )(command)
        return command

    return decorate


def pick(cls: type[S], values: dict[str, Any], *, without: tuple[str, ...] = ()) -> S:
    """The `cls` made of those `values` that are its fields; other fields keep their default."""
    names = {f.name for f in fields(cls)} - set(without)
    return cls(**{name: value for name, value in values.items() if name in names})


def flags(settings: Any, *, without: tuple[str, ...] = ()) -> list[str]:
    """The command line that `options` would read as `settings`."""
    names = [f.name for f in fields(settings) if f.name not in without]
    values = {name.replace("_", "-"): getattr(settings, name) for name in names}
    return [_flag(name, value) for name, value in values.items() if value is not None]


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"


def _spelt(f: Field[Any]) -> str:
    name = f.name.replace("_", "-")
    return f"--{name}/--no-{name}" if f.metadata["kind"] is bool else f"--{name}"


@dataclass(frozen=True, slots=True)
class CommonSettings:
    """What routers and workers share."""

    redis_url: str = setting(
        "redis://127.0.0.1:6379/0", "Redis that holds the shared state.", env="REDIS_URL"
    )
    namespace: str = setting(
        "default", "One model, block size and hash settings; all keys carry it."
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    log_level: str = setting("info", "Least severe messages to log.", click.Choice(LOG_LEVELS))


@dataclass(frozen=True, slots=True)
class RouterSettings(CommonSettings):
    """One router replica."""

    port: int = setting(8080, "Port to listen on; 0 takes a free one.", PORT)
    policy: str = setting(
        "latency", "Cost function, where a request names none.", click.Choice(POLICY_NAMES)
    )
    temperature: float = setting(
        0.0,
        "0: always the lowest cost; above: sample from the softmax of the costs.",
        Number(0, 1000),
    )
    seed: int | None = setting(None, "Seed of the random choices; none: a random one.", SEED)
    redis_timeout_ms: int = setting(
        250,
        "Without an answer by then, requests are routed by the last loads seen.",
        click.IntRange(1, 600_000),
    )
    read_from: str = setting(
        "master",
        "Where overlap is looked up; replicas (of Sentinel or a Cluster) take load off the masters "
        "and lag a little behind.",
        click.Choice(("master", "replica")),
    )
    kv_events: bool = setting(
        True,
        "Whether workers publish what they cache. If not, what was routed to them counts, for "
        "--prediction-ttl-s after its last use.",
        bool,
    )
    count_in_flight: bool = setting(
        False,
        "Also with KV events, take what was routed to a worker in the last --prediction-ttl-s for "
        "cached there.",
        bool,
    )
    prediction_ttl_s: float = setting(
        120.0, "What was routed to a worker counts as cached for so long.", POSITIVE_SECONDS
    )
    prediction_entries: int = setting(
        262_144,
        "So many blocks are recorded as routed, in each shard; then the oldest fifth is given up.",
        POSITIVE,
    )
    decisions_kept: int = setting(
        8192,
        "Decisions kept in Redis for `kvroute explain`, `whatif` and `inspect usage`; 0: none.",
        COUNT,
    )
    details_per_s: int = setting(
        20,
        "Of so many a second, and of those that ask to be explained, all candidates are kept too.",
        COUNT,
    )
    reservation_ttl_s: float = setting(
        600.0,
        "A reservation not released by then is forgotten.",
        POSITIVE_SECONDS,
    )
    wait_queue: int = setting(
        0,
        "So many requests wait at this replica while no worker can take them; 0: they are refused "
        "(429).",
        click.IntRange(0, 4096),
    )
    wait_above_s: float | None = setting(
        None,
        "Requests wait, or are refused, while every worker's queue of prefills is predicted to "
        "last longer; none: while all have --max-requests.",
        SECONDS,
    )
    wait_timeout_s: float = setting(
        10.0, "Who has waited for so long is refused (429).", POSITIVE_SECONDS
    )
    tenant_weights: str = setting(
        "", "Shares of turns of the tenants that wait, NAME=WEIGHT,...; others weigh 1.", _Weights()
    )
    session_affinity: float = setting(
        0.0,
        "0-1: so much of what the worker that a session last went to lacks of a prompt is taken "
        "to be there all the same; 0: sessions do not count.",
        Number(0, 1),
    )
    session_ttl_s: float = setting(
        600.0, "Where a session went is forgotten after so long.", POSITIVE_SECONDS
    )
    max_body_bytes: int = setting(
        8 * 1024 * 1024, "Larger request bodies are refused (413).", POSITIVE
    )
    max_prompt_tokens: int = setting(1_048_576, "Longer prompts are refused (422).", POSITIVE)
    shared_fd: int | None = setting(
        None,
        "An inherited listening socket to serve as well, shared with other replicas.",
        click.IntRange(0, 2**31 - 1),
    )

    @property
    def max_queue_s(self) -> float:
        """Of a worker that takes requests, where they may wait for it to become so short."""
        return math.inf if self.wait_above_s is None or not self.wait_queue else self.wait_above_s


@dataclass(frozen=True, slots=True)
class WorkerSettings(CommonSettings):
    """One worker: an agent and the engine it hosts."""

    port: int = setting(8081, "Port to listen on.", PORT)
    worker_id: str = setting("", "Name in the fleet; none: the host name.")
    dp_rank: int = setting(0, "Data-parallel rank.", click.IntRange(0, 65535))
    address: str = setting(
        "",
        "Base URL that clients reach it by; none: http://<host>:<port>, with the host name in "
        "place of 0.0.0.0 or ::.",
        _BaseUrl(),
    )
    # At most what fits into the pool of any worker that is not told how large it is to be.
    block_size: int = setting(16, "Tokens per KV block.", click.IntRange(1, 4096))
    engine: str = setting(
        "sim", "sim: simulated; torch: computes a Llama model.", click.Choice(("sim", "torch"))
    )
    kv_pool_tokens: int | None = setting(
        None, "Device KV pool, tokens; none: the profile's, or 1 GiB.", POSITIVE
    )
    host_pool_tokens: int = setting(0, "Host KV pool, tokens.", COUNT)
    profile: str = setting(
        "70b-4xh100", "Timing of the simulated engine: 70b-4xh100, 70b-4xh200 or 8b-1xh100."
    )
    speedup: float = setting(
        1.0, "Run the simulated engine so many times faster than the clock.", FACTOR
    )
    model: str = setting(
        "40m",
        "Of the torch engine: a folder with a Hugging Face checkpoint of a Llama, or a size that "
        "gets random weights: tiny, 40m, 125m, llama-3.2-1b or llama-3.1-8b.",
    )
    device: str = setting(
        "auto", "Of the torch engine: cpu, cuda or cuda:N; auto: a GPU, if there is one."
    )
    dtype: str = setting(
        "auto",
        "Of weights and KV of the torch engine; auto: bfloat16 on a GPU, else float32.",
        click.Choice(("auto", "float32", "bfloat16", "float16")),
    )
    threads: int | None = setting(
        None,
        "Threads that the torch engine computes with on a CPU; none: all cores.",
        click.IntRange(1, 1024),
    )
    prefill_chunk: int = setting(
        256,
        "The torch engine computes so many prompt tokens at a time, and reuses multiples of that.",
        POSITIVE,
    )
    max_num_seqs: int = setting(64, "Requests that the torch engine runs at once.", POSITIVE)
    disk_pool_tokens: int = setting(0, "KV pool of the torch engine on disk, tokens.", COUNT)
    disk_folder: str = setting(
        "", "Where that lies: a folder in which each worker has one of its own."
    )
    write_policy: str = setting(
        "back",
        "The torch engine stores blocks in the next slower tier when they are evicted (back) or as "
        "soon as they are filled (through).",
        click.Choice(("back", "through")),
    )
    store_min_uses: int = setting(
        1, "The torch engine stores blocks there that so many requests have used.", POSITIVE
    )
    max_requests: int = setting(
        256, "Requests reserved on it at once; then it is full.", click.IntRange(1, 1_000_000)
    )
    lease_ttl_s: float = setting(
        3.0, "Routed to for so long after its last sign of life.", POSITIVE_SECONDS
    )
    index_blocks: int | None = setting(
        None,
        "Unique blocks the namespace is laid out for; counts when its first worker registers; "
        "none: 16 times this worker's pool.",
        POSITIVE,
    )
    index_shards: int = setting(
        1,
        "Shards of the namespace's index; counts when its first worker registers.",
        click.IntRange(1, 1024),
    )

    def resolved_id(self) -> str:
        return self.worker_id or socket.gethostname()

    def resolved_address(self) -> str:
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104
        return self.address or base_url(host, self.port)
