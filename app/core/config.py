"""Settings of each process: one frozen dataclass, built once from flags, KVROUTE_* and REDIS_URL.

`options` makes a command-line option of every field, so that its flag, its variable, its default
and its help are in one place. Other code gets its settings from here, not from the environment.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from app.core.errors import ConfigError, KvrouteError
from app.core.types import TENANT_ID

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
    """A number in a range. Refuses `nan`, which a comparison with a bound lets pass."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


MOST = 10**12
"""The largest count: exact as a double, which is what Lua counts in."""
LONGEST_S = 10 * 365 * 24 * 3600

PORT = click.IntRange(0, 65535)
SEED = click.IntRange(0, 2**64 - 1)
COUNT = click.IntRange(0, MOST)
POSITIVE = click.IntRange(1, MOST)
PROCESSES = click.IntRange(1, 1024)
SECONDS = Number(0, LONGEST_S)
# Redis counts milliseconds: what rounds to none of them would expire at once.
POSITIVE_SECONDS = Number(0.001, LONGEST_S)
FACTOR = Number(0.001, 1_000_000)


def parse_weights(text: str) -> dict[str, float]:
    """Tenant -> weight, from text like `a=4,b=0.5`. Raises ValueError for anything else."""
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, weight = part.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = math.nan
        if not TENANT_ID.fullmatch(name) or not 0.001 <= weights[name] <= 1000:
            raise ValueError(
                "each entry needs a name and a weight from 0.001 to 1000, without spaces"
            )
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


class BaseUrl(click.ParamType[str]):
    """Empty, or an http(s) URL that names a host and to which a path can be added."""

    name = "URL"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if value and not _is_base_url(value):
            self.fail(f"{value!r} is not the http:// or https:// base URL of a host", param, ctx)
        return str(value)


def _is_base_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        has_host = bool(url.hostname) and url.port != 0
    except ValueError:
        return False
    return has_host and url.scheme in ("http", "https") and not url.query and not url.fragment


def base_url(host: str, port: int) -> str:
    """The URL of what listens there; an IPv6 address goes in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def cluster_size(command: F) -> F:
    """Adds --workers and --replicas to a command that starts a cluster on this machine."""
    for flag, number, what in (("replicas", 3, "router replicas"), ("workers", 8, "workers")):
        command = click.option(
            f"--{flag}",
            f"num_{flag}",
            default=number,
            show_default=True,
            type=PROCESSES,
            help=f"Number of {what}.",
        )(command)
    return command


class Command(click.Command):
    """Shows our errors, and those of the system, such as a full disk, as one line, no traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        error: BaseException
        try:
            return super().invoke(ctx)
        except* (KvrouteError, OSError) as group:
            error = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        # Out here, as early releases of Python 3.11 wrap what is raised in an except* clause.
        if isinstance(error, BrokenPipeError):
            raise error  # click ends quietly when nobody reads the output any more
        raise click.ClickException(str(error))


@contextmanager
def naming_file(file: object) -> Iterator[None]:
    """Adds the name of a file to errors of writing it, of which the system names only the cause."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}") from None


class _Option(click.Option):
    """Ignores what Kubernetes puts into KVROUTE_PORT of every pod near a Service named kvroute."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        value = super().resolve_envvar_value(ctx)
        return None if value and self.type is PORT and value.startswith("tcp://") else value


def setting(default: Any, help_text: str, kind: Any = None, env: str | None = None) -> Any:
    """A dataclass field that `options` can show. env: its variable, if not KVROUTE_<NAME>."""
    return field(default=default, metadata={"help": help_text, "kind": kind, "env": env})


def variable(f: Field[Any]) -> str:
    """The environment variable of a field made by `setting`."""
    env: str = f.metadata["env"] or f"KVROUTE_{f.name.upper()}"
    return env


def options(cls: type, *, without: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Adds a click option for every field of `cls`, except those in `without`, to a command."""

    def decorate(command: F) -> F:
        for f in reversed(fields(cls)):
            if f.name not in without:
                command = click.option(
                    _spelt(f),
                    f.name,
                    cls=_Option,
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
    """A `cls` made from those of `values` that are its fields; the others keep their default."""
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
        "default",
        "Namespace for one model, block size and set of hash settings; part of every key.",
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    log_level: str = setting("info", "Minimum severity to log.", click.Choice(LOG_LEVELS))


@dataclass(frozen=True, slots=True)
class RouterSettings(CommonSettings):
    """One router replica."""

    port: int = setting(8080, "Port to listen on; 0 takes a free one.", PORT)
    policy: str = setting(
        "latency", "Cost function for requests that name none.", click.Choice(POLICY_NAMES)
    )
    temperature: float = setting(
        0.0,
        "0 always takes the lowest cost; above 0 samples, the cheaper the likelier (softmax).",
        Number(0, 1000),
    )
    seed: int | None = setting(None, "Seed for random choices; unset: a random one.", SEED)
    redis_timeout_ms: int = setting(
        250,
        "Milliseconds to wait for Redis; after that, requests are routed by the last loads seen.",
        click.IntRange(1, 600_000),
    )
    read_from: str = setting(
        "master",
        "Where to look up overlap. Replicas (of Sentinel or a Cluster) take load off the masters "
        "but lag slightly behind.",
        click.Choice(("master", "replica")),
    )
    kv_events: bool = setting(
        True,
        "Whether workers publish what they cache. If not, blocks routed to a worker count as "
        "cached there for --prediction-ttl-s after their last use.",
        bool,
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
    )
    details_per_s: int = setting(
        20,
        "All candidates are kept too for this many decisions a second (fewer with more than 64 "
        "workers), and for every request that asks to be explained.",
        COUNT,
    )
    reservation_ttl_s: float = setting(
        600.0,
        "A reservation not released within this time expires.",
        POSITIVE_SECONDS,
    )
    wait_queue: int = setting(
        0,
        "Requests that may wait at this replica while no worker can take them; 0: they are refused "
        "(429).",
        click.IntRange(0, 4096),
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
        "Weights for sharing turns among waiting tenants, NAME=WEIGHT,...; all others weigh 1.",
        _Weights(),
    )
    session_affinity: float = setting(
        0.0,
        "0-1: the worker a session last went to is credited with this fraction of the part of the "
        "prompt that it does not hold; 0 ignores sessions.",
        Number(0, 1),
    )
    session_ttl_s: float = setting(
        600.0,
        "How long to remember which worker a session last went to.",
        POSITIVE_SECONDS,
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
        """The longest queue of a worker that takes requests, seconds; infinite unless requests may
        wait for it to shorten and --wait-above-s is set."""
        return math.inf if self.wait_above_s is None or not self.wait_queue else self.wait_above_s


@dataclass(frozen=True, slots=True)
class WorkerSettings(CommonSettings):
    """One worker: an agent and the engine it hosts."""

    port: int = setting(8081, "Port to listen on; 0 takes a free one.", PORT)
    worker_id: str = setting("", "Name in the fleet; unset: the host name.")
    dp_rank: int = setting(0, "Data-parallel rank.", click.IntRange(0, 65535))
    address: str = setting(
        "",
        "Base URL at which clients reach the worker; unset: http://<host>:<port>, with the host "
        "name in place of 0.0.0.0 or ::.",
        BaseUrl(),
    )
    # At most what fits into the pool of any worker whose pool size is not given.
    block_size: int = setting(16, "Tokens per KV block.", click.IntRange(1, 4096))
    engine: str = setting(
        "sim", "sim: simulated; torch: computes a Llama model.", click.Choice(("sim", "torch"))
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
    model: str = setting(
        "40m",
        "Model of the torch engine: a folder with a Hugging Face Llama checkpoint, or a size that "
        "gets random weights (tiny, 40m, 125m, llama-3.2-1b or llama-3.1-8b).",
    )
    device: str = setting(
        "auto", "Device of the torch engine: cpu, cuda or cuda:N; auto: a GPU if there is one."
    )
    dtype: str = setting(
        "auto",
        "Type of the torch engine's weights and KV; auto: bfloat16 on a GPU, else float32.",
        click.Choice(("auto", "float32", "bfloat16", "float16")),
    )
    threads: int | None = setting(
        None,
        "Threads the torch engine computes with on a CPU; unset: all cores.",
        click.IntRange(1, 1024),
    )
    prefill_chunk: int = setting(
        256,
        "Prompt tokens the torch engine computes at a time; prefix reuse is in multiples of it.",
        POSITIVE,
    )
    max_num_seqs: int = setting(
        64, "Maximum number of requests the torch engine runs at once.", POSITIVE
    )
    disk_pool_tokens: int = setting(0, "Size of the torch engine's disk KV pool in tokens.", COUNT)
    disk_folder: str = setting(
        "", "Folder of the disk KV pool; each worker has its own folder in it."
    )
    write_policy: str = setting(
        "back",
        "When the torch engine stores blocks in the next slower tier: when they are evicted (back) "
        "or as soon as they are filled (through).",
        click.Choice(("back", "through")),
    )
    store_min_uses: int = setting(
        1,
        "Requests that must have used a block before the torch engine stores it in a slower tier.",
        POSITIVE,
    )
    max_requests: int = setting(
        256,
        "Requests that may be reserved on the worker at once; then it is full.",
        click.IntRange(1, 1_000_000),
    )
    lease_ttl_s: float = setting(
        3.0, "How long the worker is routed to after its last sign of life.", POSITIVE_SECONDS
    )
    drain_s: float = setting(
        2.0,
        "How long a worker that is told to stop may take to finish the answers under way.",
        SECONDS,
    )
    index_blocks: int | None = setting(
        None,
        "Unique blocks the namespace is laid out for, set by the first worker to register; "
        "unset: 16 times this worker's pool.",
        POSITIVE,
    )
    index_shards: int = setting(
        1,
        "Shards of the namespace's index, set by the first worker to register.",
        click.IntRange(1, 1024),
    )

    def resolved_id(self) -> str:
        return self.worker_id or socket.gethostname()

    def resolved_address(self) -> str:
        host = socket.gethostname() if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104
        return self.address or base_url(host, self.port)
