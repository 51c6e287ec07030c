"""The console's answers on a terminal, 80 columns wide or more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from app.core.printable import printable

MAX_FINDINGS = 3
MAX_ERRORS = 3
COLUMNS = {
    "worker": "worker",
    "state": "state",
    "queue_s": "queue",
    "requests": "requests",
    "ok": "ok",
    "failed": "failed",
    "left_before": "left",
    "retried": "moved",
    "output": "tokens",
    "kv_used": "KV",
    "reported_hit": "hits",
}
"""Of workers, and their titles."""
MODEL_COLUMNS = {
    "model": "model",
    "ok": "ok",
    "engine": "failed",
    "cut": "cut",
    "left_before": "left",
    "refused": "refused",
    "output": "tokens",
    "retries": "retries",
    "migrations": "migrated",
    "sources": "sources",
}
MAX_MODELS = 4
FAILED_SHARE = 0.05
SORTED = tuple(COLUMNS)
LEVELS = {"bad": "red", "warn": "yellow"}
STATES = {
    "live": "green",
    "draining": "yellow",
    "paused": "yellow",
    "degraded": "yellow",
    "failing": "red",
    "ill": "red",
    "tainted": "red",
    "stale": "red",
    "gone": "dim",
}


@dataclass(frozen=True, slots=True)
class Choices:
    """What whoever looks has chosen. sort: a position in SORTED; by state is by trouble. first: of
    the workers, the first that is shown."""

    sort: int = SORTED.index("state")
    descending: bool = True
    first: int = 0

    def after(self, key: str) -> Choices:
        """Arrows choose the column and scroll, r reverses."""
        match key:
            case "left" | "right":
                step = 1 if key == "right" else -1
                return replace(self, sort=(self.sort + step) % len(SORTED))
            case "up" | "down":
                return replace(self, first=max(0, self.first + (1 if key == "down" else -1)))
            case "r":
                return replace(self, descending=not self.descending)
        return self


def screen(answers: Mapping[str, Any], choices: Choices, height: int | None) -> Group:
    """The overview, the workers and the newest decisions. height: in lines; None: as many as
    there are."""
    models = objects(answers["overview"]["models"])[:MAX_MODELS]
    head = [*_overview(answers["overview"])]
    workers = _sorted(objects(answers["workers"]), choices)
    decisions = objects(answers["decisions"])
    if height is not None:
        room = max(4, height - len(head) - len(models) - 7)
        first = min(choices.first, max(0, len(workers) - room // 2))
        workers = workers[first : first + max(room // 2, room - len(decisions))]
        decisions = decisions[: max(1, room - len(workers))]
    tables = [_models(models)] if models else []
    return Group(*head, *tables, _workers(workers, choices), _decisions(decisions), _help())


def objects(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


def _overview(overview: Mapping[str, Any]) -> Iterable[Text]:
    tiles, redis = overview["tiles"], overview["redis"]
    replicas = len(overview["replicas"]["rows"])
    used = (redis["used_bytes"] or 0) / 2**20
    yield _line(
        ("namespace", printable(str(overview["namespace"]))),
        ("replicas", str(replicas)),
        ("workers", _number(tiles["workers"])),
        ("Redis", f"{printable(str(redis['version']))}, {used:,.0f} MiB, {_ms(redis['rtt_s'])}"),
    )
    yield _line(
        ("requests/s", _number(tiles["requests_per_s"])),
        ("failed", _percent(tiles["failed_share"])),
        ("left waiting/s", _number(tiles["left_before_per_s"])),
        ("refused/s", _number(tiles["refused_per_s"])),
    )
    yield _line(
        ("tokens/s", _number(tiles["output_tokens_per_s"])),
        ("degraded/s", _number(tiles["degraded_per_s"])),
        ("waiting", _number(tiles["waiting"])),
        ("queue", _seconds(tiles["queue_s"])),
    )
    yield _line(
        ("first token", f"{_seconds(tiles['ttft_p50_s'])}, p99 {_seconds(tiles['ttft_p99_s'])}"),
        ("in time", _percent(tiles["in_time_share"])),
        ("retries/s", _number(tiles["retries_per_s"])),
        ("migrated/s", _number(tiles["migrations_per_s"])),
    )
    yield _line(
        ("decision", f"{_ms(tiles['decision_p50_s'])}, p99 {_ms(tiles['decision_p99_s'])}"),
        ("cached", _percent(tiles["cached_share"])),
        ("predicted", _percent(tiles["predicted_share"])),
        ("split/s", _number(tiles["sources_per_s"])),
    )
    wrong = [one for one in overview["findings"] if one["level"] in LEVELS]
    for one in wrong[:MAX_FINDINGS]:
        text = f"{one['name']}: {one['detail']}; {one['remedy']}"
        yield Text(printable(text), style=LEVELS[one["level"]], overflow="ellipsis", no_wrap=True)
    for error in objects(overview["errors"])[:MAX_ERRORS]:
        who = error["worker"] or "router"
        text = f"{error['requests']} at {who} {error['cause']}: {error['words']}"
        yield Text(printable(text), style="red", overflow="ellipsis", no_wrap=True)


def _workers(rows: Sequence[Mapping[str, Any]], choices: Choices) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True)
    for at, (name, title) in enumerate(COLUMNS.items()):
        mark = ("▾" if choices.descending else "▴") if at == choices.sort else ""
        justify: Any = "left" if name in ("worker", "state") else "right"
        table.add_column(
            title + mark,
            justify=justify,
            no_wrap=True,
            overflow="ellipsis",
            min_width=14 if name == "worker" else None,
        )
    for row in rows:
        state = row["state"]
        table.add_row(
            Text(printable(str(row["worker"]))),
            Text(printable(str(state)), style=STATES.get(state, "")),
            _seconds(row["queue_s"]),
            f"{_number(row['requests'])}/{_number(row['max_requests'])}",
            *(_number(row[name]) for name in ("ok", "failed", "left_before", "retried", "output")),
            _percent(row["kv_used"]),
            _percent(row["reported_hit"]),
        )
    return table


def _models(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How their requests of the last minute ended."""
    table = Table(box=None, padding=(0, 1), expand=True)
    for name, title in MODEL_COLUMNS.items():
        justify: Any = "left" if name == "model" else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        name, *counts = MODEL_COLUMNS
        style = "red" if (row["failed_share"] or 0.0) > FAILED_SHARE else ""
        model = Text(printable(str(row[name] or "(not known)")), style=style)
        table.add_row(model, *(_number(row[count]) for count in counts))
    return table


def _decisions(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 1), expand=True)
    for title in ("request", "to", "why", "held", "best", "tokens"):
        justify: Any = "left" if title in ("request", "to", "why") else "right"
        table.add_column(title, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(
            Text(printable(str(row["request_id"]))),
            Text(printable(str(row["worker"]))),
            Text(printable(str(row["locality"]))),
            f"{row['overlap_blocks']:,}/{row['full_blocks']:,}",
            f"{row['best_blocks']:,}",
            f"{row['isl_tokens']:,}",
        )
    return table


def _help() -> Text:
    return Text("q quit  ←→ sort by  r reverse  ↑↓ scroll", style="dim")


def _sorted(rows: list[dict[str, Any]], choices: Choices) -> list[dict[str, Any]]:
    """What is not known comes last, whichever the direction."""
    name = SORTED[choices.sort].replace("state", "trouble")
    known = [row for row in rows if row[name] is not None]
    known.sort(key=lambda row: row[name], reverse=choices.descending)
    return known + [row for row in rows if row[name] is None]


def _line(*pairs: tuple[str, str]) -> Text:
    line = Text(overflow="ellipsis", no_wrap=True)
    for name, value in pairs:
        line.append(f"{name} ", style="dim").append(f"{value}   ")
    return line


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.4g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.1f} ms"
