"""Kinds of settings, and the settings that all processes have.

Each field has its default, help, variable and kind of values, as plain data, only here.
app/options.py makes command-line options of them. Other code gets its settings from here, not from
the environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from typing import Any
from urllib.parse import urlsplit

from app.core.keys import NAMESPACE
from app.core.types import TENANT_ID

PRIORITIES = ("high", "normal", "low")
PRIORITY_SHARES = dict(zip(PRIORITIES, (16.0, 1.0, 1 / 16), strict=True))
"""Priority -> factor on a tenant's weight. No priority is strict, so nothing starves."""
COMMON = "Common"
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Integers:
    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Real:
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class OneOf:
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """Text of some form. shape: the form, in a word. check: raises ValueError for other text.
    separator: between entries, which may also be given one by one; "": not a list."""

    shape: str
    check: Callable[[str], object]
    separator: str = ""


@dataclass(frozen=True, slots=True)
class PolicyName:
    """Name in the table of policies, app/policy/policies.py."""


Kind = Integers | Real | OneOf | Text | PolicyName | type[bool] | None


def parse_weights(text: str) -> dict[str, float]:
    """Returns tenant -> weight, from text like `a=4,b=0.5`. Raises ValueError for anything else."""
    weights: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, weight = part.rpartition("=")
        try:
            weights[name] = float(weight)
        except ValueError:
            weights[name] = math.nan
        if not TENANT_ID.fullmatch(name) or not 0.001 <= weights[name] <= 1000:
            raise ValueError(
                f"{text!r}: each entry needs a name and a weight from 0.001 to 1000, without spaces"
            )
    return weights


def parse_sharing(text: str) -> tuple[dict[str, float], ...]:
    """Returns groups of namespaces with weights, from text like `old=9,new=1;blue=0,green=1`, with
    blanks and ends of lines between entries or not. Raises ValueError for anything else."""
    groups: list[dict[str, float]] = []
    seen = set[str]()
    for part in text.split(";"):
        group: dict[str, float] = {}
        for entry in filter(None, map(str.strip, part.split(","))):
            name, _, weight = (word.strip() for word in entry.partition("="))
            if not NAMESPACE.fullmatch(name):
                raise ValueError(f"{entry!r}: a namespace and its weight are needed, NAME=WEIGHT")
            if name in seen:
                raise ValueError(f"{entry!r}: {name} has a weight already")
            seen.add(name)
            group[name] = _weight(entry, weight)
        if group and not any(group.values()):
            raise ValueError(f"{part.strip()!r}: one weight at least must be more than 0")
        groups += [group] if group else []
    return tuple(groups)


def _weight(entry: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (weight == 0 or 0.001 <= weight <= 1000):
        raise ValueError(f"{entry!r}: the weight must be 0, or from 0.001 to 1000")
    return weight


def check_base_url(text: str) -> None:
    """Raises ValueError unless `text` is empty, or an http(s) URL that names a host and to which a
    path such as /v1/models can be added."""
    if text and not _is_base_url(text):
        raise ValueError(f"{text!r} is not the http:// or https:// base URL of a host")
    _without_v1(text)


def _is_base_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        has_host = bool(url.hostname) and url.port != 0
    except ValueError:
        return False
    return has_host and url.scheme in ("http", "https") and not url.query and not url.fragment


def _without_v1(url: str) -> None:
    """Raises ValueError for the base URL of OpenAI's clients: paths begin with /v1 here."""
    if url.rstrip("/").endswith("/v1"):
        raise ValueError(f"{url!r}: leave out /v1 at its end, which is added where it belongs")


def parse_engines(text: str) -> list[str]:
    """Returns the base URLs of engines, from text like `http://a:8000,http://b:8000`, each once;
    none for `sim` and `torch`. Raises ValueError for anything else."""
    if text in ("sim", "torch"):
        return []
    urls = [url.strip() for url in text.split(",")]
    for url in urls:
        if not _is_base_url(url):
            raise ValueError(f"{url!r} is not sim, torch or http://HOST:PORT of an engine")
        _without_v1(url)
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def parse_origins(text: str) -> list[str]:
    """Returns origins, from text like `https://a.example,http://localhost:3000`. Raises ValueError
    for anything else."""
    origins = [origin.strip() for origin in text.split(",") if origin.strip()]
    for origin in origins:
        if origin != "*" and not (_is_base_url(origin) and origin.count("/") == 2):
            raise ValueError(f"{origin!r} is no origin: * or SCHEME://HOST[:PORT], without a path")
    return origins


def base_url(host: str, port: int) -> str:
    """Returns the URL of a listener; an IPv6 address goes in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


MOST = 10**12
"""Largest count: exact as a double, in which Lua counts."""
LONGEST_S = 10 * 365 * 24 * 3600

PORT = Integers(0, 65535)
SEED = Integers(0, 2**64 - 1)
COUNT = Integers(0, MOST)
POSITIVE = Integers(1, MOST)
PROCESSES = Integers(1, 1024)
SECONDS = Real(0, LONGEST_S)
# Redis counts milliseconds: what rounds to none of them would expire at once.
POSITIVE_SECONDS = Real(0.001, LONGEST_S)
FACTOR = Real(0.001, 1_000_000)
WEIGHTS = Text("NAME=WEIGHT,...", parse_weights, ",")
BASE_URL = Text("URL", check_base_url)


def setting(
    default: Any,
    help_text: str,
    kind: Kind = None,
    env: str | None = None,
    heading: str | None = None,
    *,
    often: bool = False,
) -> Any:
    """Returns a dataclass field that can be set. env: its variable, if not KVROUTE_<NAME>. heading:
    of its list, and of all further fields of the class up to the next heading. often: --help lists
    it."""
    metadata = {"help": help_text, "kind": kind, "env": env, "heading": heading, "often": often}
    return field(default=default, metadata=metadata)


def drain_setting(heading: str | None = None) -> Any:
    """Returns the field of how long answers go on when a part is told to stop: one value for all
    parts, as none must cut short what another would finish."""
    return setting(
        300.0,
        "On SIGTERM, for how long answers under way go on, at routers, workers and agents alike, "
        "before they are ended: less than the time after which the process is killed.",
        SECONDS,
        heading=heading,
    )


def headings(cls: type) -> dict[str, str]:
    heading, by_name = COMMON, {}
    for f in fields(cls):
        by_name[f.name] = heading = f.metadata["heading"] or heading
    return by_name


def flag(f: Field[Any], value: bool = True) -> str:
    """Returns a setting's flag on the command line. value: of a switch. A switch that is off and
    named no-... has no opposite: ""."""
    name = f.name.replace("_", "-")
    if f.metadata["kind"] is not bool or value:
        return f"--{name}"
    return "" if name.startswith("no-") else f"--no-{name}"


def shown_default(f: Field[Any]) -> str:
    """Returns the default as one would type it; "" if there is none, or nothing to type."""
    if f.default in (None, ""):
        return ""
    if f.metadata["kind"] is bool:
        return flag(f, bool(f.default))
    return f"{f.default:.12g}" if isinstance(f.default, float) else str(f.default)


def variable(f: Field[Any]) -> str:
    env: str = f.metadata["env"] or f"KVROUTE_{f.name.upper()}"
    return env


@dataclass(frozen=True, slots=True)
class CommonSettings:
    redis_url: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis that holds the shared state.",
        env="REDIS_URL",
        often=True,
    )
    namespace: str = setting(
        "default",
        "Namespace for one model, block size and set of hash settings; part of every key.",
        often=True,
    )
    host: str = setting("127.0.0.1", "Address to listen on.", often=True)
    log_level: str = setting("info", "Minimum severity to log.", OneOf(LOG_LEVELS), often=True)


def parse_names(text: str) -> dict[str, str]:
    """Returns name -> value, from text like `a=x,b=y`. Raises ValueError for anything else."""
    pairs = [part.partition("=") for part in filter(None, text.split(","))]
    for name, _, value in pairs:
        if not name or not value:
            raise ValueError(f"{text!r}: each entry needs a name and a value, NAME=VALUE")
    return {name: value for name, _, value in pairs}


def parse_aliases(text: str) -> dict[str, str]:
    """Returns alias -> model, from text like `gpt-4o=llama-70b,gpt-4=llama-70b`, with blanks and
    ends of lines between entries or not. Raises ValueError for anything else."""
    models: dict[str, str] = {}
    for entry in filter(None, map(str.strip, text.split(","))):
        alias, _, model = (part.strip() for part in entry.partition("="))
        if not alias or not model:
            raise ValueError(f"{entry!r}: an alias and its model are needed, ALIAS=MODEL")
        if alias in models:
            raise ValueError(f"{entry!r}: {alias} stands for {models[alias]} already")
        models[alias] = model
    for alias, model in models.items():
        if model in models:
            raise ValueError(f"{f'{alias}={model}'!r}: {model} is an alias itself; name a model")
    return models
