"""A dashboard for Grafana, from its panels: expressions, and where each panel lies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "$datasource"}
WIDTH = 24
JOBS = {
    "routers": "decisions_total",
    "workers": "engine_requests",
    "planners": "planner_leads",
}
"""Variables: the scrape jobs that have a metric."""
TARGETS_S = ("0.5", "1.0", "2.0", "5.0", "10.0")
"""Of kvroute_door_ttft_seconds, bounds that somebody may promise."""


@dataclass(frozen=True, slots=True)
class Panel:
    """curves: expressions and their names. steps: from which value on a tile has which colour."""

    title: str
    description: str
    unit: str
    curves: Sequence[tuple[str, str]]
    is_stacked: bool = False
    steps: Mapping[float | None, str] = field(default_factory=dict)

    @property
    def size(self) -> tuple[int, int]:
        return (4, 4) if self.steps else (8, 8)


@dataclass(frozen=True, slots=True)
class Row:
    """repeat: a variable, for each of whose chosen values there is such a row."""

    title: str
    panels: Sequence[Panel]
    repeat: str = ""


def chart(title: str, description: str, unit: str, *curves: tuple[str, str]) -> Panel:
    return Panel(title, description, unit, curves)


def stack(title: str, description: str, unit: str, *curves: tuple[str, str]) -> Panel:
    return Panel(title, description, unit, curves, is_stacked=True)


def tile(
    title: str,
    description: str,
    unit: str,
    expression: str,
    steps: Mapping[float | None, str] | None = None,
) -> Panel:
    return Panel(title, description, unit, [(expression, title)], steps=steps or {None: "green"})


def rate(metric: str, by: str = "", **labels: str) -> str:
    """labels: patterns, those of `not_<label>` of what is left out; job: $routers if not given."""
    return f"sum{_by(by)}(rate({_series(metric, labels)}[$__rate_interval]))"


def quantile(q: float, metric: str, by: str = "", **labels: str) -> str:
    observed = rate(f"{metric}_bucket", f"{by}, le" if by else "le", **labels)
    return f"histogram_quantile({q}, {observed})"


def most(metric: str, by: str = "", **labels: str) -> str:
    return f"max{_by(by)}({_series(metric, labels)})"


def share(part: str, whole: str) -> str:
    """By the labels that both have."""
    return f"{part} / {whole}"


def of_all(part: str, whole: str) -> str:
    """Whatever labels the part has."""
    return f"{part} / scalar({whole})"


def dashboard(rows: Sequence[Row]) -> dict[str, Any]:
    """As Grafana imports it."""
    panels = list(_placed(rows))
    return {
        "title": "kvroute",
        "uid": "kvroute",
        "tags": ["kvroute"],
        "schemaVersion": 39,
        "timezone": "browser",
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "graphTooltip": 1,
        "templating": {"list": _variables()},
        "panels": [{"id": number} | panel for number, panel in enumerate(panels, 1)],
    }


def _by(labels: str) -> str:
    return f" by ({labels}) " if labels else ""


def _series(metric: str, labels: Mapping[str, str]) -> str:
    matchers = [
        f'{name.removeprefix("not_")}{"!~" if name.startswith("not_") else "=~"}"{pattern}"'
        for name, pattern in {"job": "$routers", **labels}.items()
    ]
    return f"kvroute_{metric}{{{', '.join(matchers)}}}"


def _placed(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    y = 0
    for row in rows:
        title = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
        repeat = {"repeat": row.repeat} if row.repeat else {}
        yield title | repeat | {"gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y}}
        y += 1
        x = height = 0
        for panel in row.panels:
            width, height = panel.size
            if x + width > WIDTH:
                x, y = 0, y + height
            yield _panel(panel) | {"gridPos": {"h": height, "w": width, "x": x, "y": y}}
            x += width
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.is_stacked:
        defaults["custom"] = {"fillOpacity": 20, "stacking": {"mode": "normal"}}
    if panel.steps:
        steps = [{"value": value, "color": color} for value, color in panel.steps.items()]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "type": "stat" if panel.steps else "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"expr": expression, "refId": chr(ord("A") + at), "legendFormat": legend}
            for at, (expression, legend) in enumerate(panel.curves)
        ],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"type": "datasource", "name": "datasource", "label": "Data source"}
    everything = {"includeAll": True, "allValue": ".*"}
    chosen = {"current": {"text": "All", "value": "$__all"}}
    target = {"type": "custom", "name": "target_s", "label": "First token within, s"}
    values = {"query": ",".join(TARGETS_S), "current": {"text": "5.0", "value": "5.0"}}
    return [
        source | {"query": "prometheus"},
        *(_labels(name, metric, "job") | everything | chosen for name, metric in JOBS.items()),
        _labels("worker", "worker_requests", "worker"),
        target | values,
    ]


def _labels(name: str, metric: str, label: str) -> dict[str, Any]:
    """A variable: the values that a label of a metric has."""
    return {
        "type": "query",
        "name": name,
        "label": name.title(),
        "query": f"label_values(kvroute_{metric}, {label})",
        "datasource": DATASOURCE,
        "multi": True,
        "refresh": 2,
    }
