"""Each alert of deploy/alerts.yaml fires on what it is for, and on nothing near it, in promtool."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from app.core.outcomes import NEVER_CAME, matching
from app.ops.conditions import CONDITIONS, ELSEWHERE
from tests.redis_servers import require_binary
from workers.discovery.fleet import STALE_S

ROOT = Path(__file__).parents[1]
ALERTS = ROOT / "deploy/alerts.yaml"
GROUPS = ("kvroute", "kvroute-door")
Series = dict[str, str]
"""Each with its values, a minute apart, in promtool's notation."""
LONG = "30m"
"""Longer than any alert waits."""


@dataclass(frozen=True, slots=True)
class Case:
    """fires, silent: series by which it does, and does not. labels: of the alert, besides job."""

    fires: Series
    silent: Series
    labels: dict[str, str] = field(default_factory=dict)


def rising(per_minute):
    return f"0+{per_minute}x40"


def door(outcome, code=200, model="m"):
    return (
        f'kvroute_door_requests_total{{job="r",model="{model}",outcome="{outcome}",code="{code}"}}'
    )


def first_tokens(below_5_s, above):
    name = "kvroute_door_ttft_seconds_bucket"
    counts = {"1.0": 0, "5.0": below_5_s, "10.0": below_5_s + above, "+Inf": below_5_s + above}
    return {f'{name}{{job="r",model="m",le="{le}"}}': rising(n) for le, n in counts.items()}


def decisions(below, above):
    name = "kvroute_decision_seconds_bucket"
    counts = {"0.1": below, "0.25": below + above, "+Inf": below + above}
    return {f'{name}{{job="r",le="{le}"}}': rising(n) for le, n in counts.items()}


def counter(metric, **labels):
    told = ",".join(f'{name}="{value}"' for name, value in {"job": "r", **labels}.items())
    return f"kvroute_{metric}{{{told}}}"


def on_and_off(metric, on, off, **labels):
    series = counter(metric, **labels)
    return Case({series: on}, {series: off}, labels)


def flood(share, *, waits):
    """waits: seconds a minute that each of the keys waits."""
    tokens = {"ann": share, "bob": 100 - share}
    used = {
        counter("key_tokens_total", key=key, kind="prompt"): rising(number)
        for key, number in tokens.items()
    }
    asked = {counter("key_requests_total", key=key, ended="ok"): rising(5) for key in tokens}
    waited = {
        counter("key_waited_seconds_total", key=key): rising(seconds)
        for key, seconds in zip(tokens, waits, strict=True)
    }
    return used | asked | waited


RISES, STANDS = rising(6), "7x40"
CASES = {
    "KvrouteNoWorkers": Case(
        {counter("asleep"): "0x40"}, {counter("worker_requests", worker="a:0"): STANDS}
    ),
    "KvrouteRequestsRefused": Case(
        {counter("decisions_total", outcome="all_busy"): RISES},
        {
            counter("decisions_total", outcome="all_busy"): STANDS,
            counter("decisions_total", outcome="routed"): RISES,
            counter("decisions_total", outcome="too_large"): RISES,
            counter("decisions_total", outcome="gone"): RISES,
        },
        {"outcome": "all_busy"},
    ),
    "KvrouteDegraded": on_and_off("degraded_decisions_total", RISES, STANDS),
    "KvrouteBlind": on_and_off("blind_decisions_total", RISES, STANDS),
    "KvrouteSlowDecisions": Case(decisions(90, 10), decisions(1000, 1)),
    "KvrouteWorkerStale": Case(
        {counter("worker_stale", worker="a:0"): "1x40"},
        {
            counter("worker_stale", worker="a:0"): "0x40",
            counter("worker_stale", worker="b:0"): "1x40",
            counter("worker_agent_away_seconds", worker="b:0"): RISES,
        },
        {"worker": "a:0"},
    ),
    "KvrouteAgentsAway": Case(
        {counter("worker_agent_away_seconds", worker="a:0"): "0+60x40"},
        {counter("worker_stale", worker="a:0"): "1x40"},
    ),
    "KvrouteWorkersFail": on_and_off("worker_suspensions_total", RISES, STANDS),
    "KvrouteFirstTokensLate": on_and_off(
        "worker_first_token_late_seconds", "2x40", "0.5x40", worker="a:0"
    ),
    "KvrouteQueuesLong": Case(
        {counter("worker_queue_seconds", worker=name): "37x40" for name in ("a:0", "b:0")},
        {
            counter("worker_queue_seconds", worker="a:0"): "37x40",
            counter("worker_queue_seconds", worker="b:0"): "0x40",
        },
    ),
    "KvrouteWorkersRestart": on_and_off("worker_changes", "4x40", "3x40", worker="a:0"),
    "KvrouteLoopLate": on_and_off("loop_late_seconds", "0.05x40", "0.01x40", instance="a"),
    "KvrouteRouterBusy": on_and_off("process_cpu", "0.95x40", "0.5x40", instance="a"),
    "KvrouteWorkerTainted": on_and_off(
        "worker_state", "1x40", "0x40", worker="a:0", state="tainted"
    ),
    "KvrouteReservationsExpire": Case(
        {counter("reservations_total", event="expired"): RISES},
        {
            counter("reservations_total", event="expired"): STANDS,
            counter("reservations_total", event="released"): RISES,
        },
    ),
    "KvrouteIndexOverfull": on_and_off("index_fill", "5x40", "4x40"),
    "KvrouteRedisMayEvict": on_and_off("redis_may_evict", "1x40", "0x40"),
    "KvrouteRedisNearlyFull": on_and_off("redis_memory_fill", "0.95x40", "0.9x40"),
    "KvrouteReplicaDown": Case(
        {
            counter("waiting_requests", instance="a"): "0x5 _x40",
            'up{job="r",instance="a"}': "1x5 0x40",
        },
        {
            counter("waiting_requests", instance="a"): "0x40",
            'up{job="r",instance="a"}': "1x40",
            'up{job="other",instance="b"}': "0x40",
        },
        {"instance": "a"},
    ),
    "KvrouteTrafficGone": Case(
        {counter("decisions_total", outcome="routed"): "0+60x15 900x30"},
        {
            counter("decisions_total", outcome="routed"): "0+60x15 900x30",
            door("ok"): "0+60x40",
        },
    ),
    "KvrouteNoKeyLeft": on_and_off("no_key_left", "1x40", "0x40", instance="a"),
    "KvrouteFilesRefused": on_and_off("files_refused", "1x40", "0x40", instance="a", what="keys"),
    "KvrouteTaskFails": Case(
        {counter("task_failures_total", task="keys"): RISES},
        {counter("task_failures_total", task="keys"): STANDS},
        {"task": "keys"},
    ),
    "KvrouteKvTransfersFail": on_and_off("worker_kv_transfers_failed", RISES, STANDS, worker="a:0"),
    "KvrouteKvFetchedLate": on_and_off("worker_kv_fetched_late", RISES, STANDS, worker="a:0"),
    "KvrouteAgentHearsNothing": on_and_off("agent_events_silent", "1x40", "0x40", instance="a"),
    "KvrouteDiscoveryStale": on_and_off(
        "agent_discovery_age_seconds", "0+60x40", "60x40", instance="a"
    ),
    "KvrouteCopiesFail": Case(
        {counter("engine_kv_block_events_total", instance="w", event="failed"): RISES},
        {
            counter("engine_kv_block_events_total", instance="w", event="failed"): STANDS,
            counter("engine_kv_block_events_total", instance="w", event="evicted"): RISES,
        },
        {"instance": "w"},
    ),
    "KvrouteRequestsFail": Case(
        {
            door("ok"): rising(90),
            door("no_workers", 503): rising(4),
            door("cut"): rising(4),
        },
        {
            door("ok"): rising(90),
            door("refused", 400): rising(900),
            door("left_before_token", 499): rising(900),
            door("cut"): rising(4),
        },
        {"model": "m"},
    ),
    "KvrouteKeysRefused": Case(
        {door("ok"): rising(60), door("invalid_api_key", 401, model=""): rising(20)},
        {door("ok"): rising(60), door("invalid_api_key", 401, model=""): rising(10)},
    ),
    "KvrouteKeyLimited": Case(
        {
            counter("key_requests_total", key="ann", ended="ok"): rising(60),
            counter("key_requests_total", key="ann", ended="refused"): rising(20),
            counter("key_limited_total", key="ann", limit="tokens"): rising(20),
        },
        {
            counter("key_requests_total", key="ann", ended="ok"): rising(60),
            counter("key_requests_total", key="ann", ended="refused"): rising(10),
            counter("key_limited_total", key="ann", limit="tokens"): rising(10),
        },
        {"key": "ann"},
    ),
    "KvrouteKeyFloods": Case(flood(90, waits=(70, 70)), flood(90, waits=(50, 50)), {"key": "ann"}),
    "KvrouteKeyNew": Case(
        {
            counter("key_requests_total", key="ann", ended="ok"): "_x25 0+90x15",
            counter("key_requests_total", key="bob", ended="ok"): rising(10),
        },
        {
            counter("key_requests_total", key="ann", ended="ok"): rising(90),
            counter("key_requests_total", key="bob", ended="ok"): "_x25 0+10x15",
            'kvroute_key_requests_total{job="s",key="ann",ended="ok"}': "_x25 0+90x15",
        },
        {"key": "ann"},
    ),
    "KvrouteClientsLeave": Case(
        {door("ok"): rising(80), door("left_before_token", 499): rising(20)},
        {
            door("ok"): rising(80),
            door("left_before_token", 499): rising(5),
            door("left_after_token"): rising(100),
        },
        {"model": "m"},
    ),
    "KvrouteRequestsUnfit": Case(
        {door("ok"): rising(10), door("refused", 400): rising(30)},
        {
            door("ok"): rising(60),
            door("refused", 400): rising(30),
            door("rate_limited", 429): rising(900),
            door("left_before_token", 499): rising(20),
        },
        {"model": "m"},
    ),
    "KvrouteModelsUnknown": Case(
        {door("ok"): rising(90), door("model_not_found", 404, model=""): rising(10)},
        {door("ok"): rising(90), door("model_not_found", 404, model=""): rising(1)},
    ),
    "KvrouteSlowFirstTokens": Case(first_tokens(90, 10), first_tokens(99, 1), {"model": "m"}),
    "KvrouteEnginesTokenize": Case(
        {
            counter("door_tokens_from_total", model="m", source="engine"): rising(60),
            counter("door_tokens_from_total", model="m", source="router"): rising(40),
        },
        {
            counter("door_tokens_from_total", model="m", source="engine"): rising(40),
            counter("door_tokens_from_total", model="m", source="client"): rising(60),
        },
        {"model": "m"},
    ),
    "KvrouteTokenizerApart": on_and_off("door_tokenizer_apart", "1x40", "0x40", model="m"),
    "KvrouteCacheApart": Case(
        {
            counter("door_cached_apart_tokens_total", model="m", worker="a:0"): rising(60),
            counter("door_cached_compared_tokens_total", model="m", worker="a:0"): rising(1000),
        },
        {
            counter("door_cached_apart_tokens_total", model="m", worker="a:0"): rising(40),
            counter("door_cached_compared_tokens_total", model="m", worker="a:0"): rising(1000),
        },
        {"model": "m"},
    ),
    "KvrouteWorkerFailsRequests": Case(
        {
            counter("door_worker_requests_total", worker="a:0", outcome="failed"): rising(30),
            counter("door_worker_requests_total", worker="a:0", outcome="ok"): rising(70),
        },
        {
            counter("door_worker_requests_total", worker="a:0", outcome="failed"): rising(10),
            counter("door_worker_requests_total", worker="a:0", outcome="full"): rising(100),
            counter("door_worker_requests_total", worker="a:0", outcome="ok"): rising(70),
        },
        {"worker": "a:0"},
    ),
}


def rules():
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        if group["name"] in GROUPS:
            yield from group["rules"]


def test_each_alert_has_a_case():
    assert [rule["alert"] for rule in rules()] == list(CASES)


def test_first_tokens_that_never_came_were_not_in_time(tmp_path):
    hangs = first_tokens(99, 1) | {door("left_before_token", 499): rising(20)}
    left_later = first_tokens(99, 1) | {door("left_after_token"): rising(20)}
    _check(tmp_path, "KvrouteSlowFirstTokens", Case(hangs, left_later, {"model": "m"}))


def test_the_console_and_the_doctor_go_by_the_same_thresholds():
    alerts = {rule["alert"]: rule["expr"].strip() for rule in rules()}
    for one in CONDITIONS:
        above = re.search(r"> ([\d.]+)$", alerts[one.name])
        assert above is not None, one.name
        assert float(above[1]) == one.threshold, one.name
        assert one.remedy
    assert f'outcome=~"{matching(*NEVER_CAME)}"' in alerts["KvrouteSlowFirstTokens"]
    assert alerts["KvrouteDiscoveryStale"].endswith(f"> {STALE_S:g}")
    text = "".join((ROOT / "app/ops" / n).read_text() for n in ("checks.py", "worker_checks.py"))
    assert all(f'"{check}"' in text for check in ELSEWHERE.values())
    # What only Prometheus can see of a replica or an engine is told there by its own log.
    only = {"KvrouteNoKeyLeft", "KvrouteFilesRefused", "KvrouteTaskFails", "KvrouteCopiesFail"}
    assert alerts.keys() - {one.name for one in CONDITIONS} - only == ELSEWHERE.keys()


def test_the_rules_are_valid():
    command = [require_binary("promtool"), "check", "rules", ALERTS]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_on_what_it_is_for_and_on_nothing_near_it(alert, tmp_path):
    _check(tmp_path, alert, CASES[alert])


def test_a_key_that_others_go_before_floods_by_what_waits(tmp_path):
    cases = flood(20, waits=(900, 100)), flood(20, waits=(100, 100))
    _check(tmp_path, "KvrouteKeyFloods", Case(*cases, {"key": "ann"}))


def test_a_model_that_sleeps_lacks_no_worker_as_long_as_a_planner_would_wake_it(tmp_path):
    asleep = counter("asleep")
    _check(tmp_path, "KvrouteNoWorkers", Case({asleep: "1x20 0x20"}, {asleep: "1x40"}))


def _check(tmp_path, alert, case):
    # promtool compares texts to the letter, and their templates are checked above.
    rule = next(rule for rule in rules() if rule["alert"] == alert)
    alone = {key: value for key, value in rule.items() if key != "annotations"}
    (tmp_path / "rules.yaml").write_text(yaml.dump({"groups": [{"name": "g", "rules": [alone]}]}))
    job = {} if alert == "KvrouteNoWorkers" else {"job": "r"}
    tests = [
        _test(alert, case.fires, [{"exp_labels": job | case.labels}]),
        _test(alert, case.silent, []),
    ]
    asked = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "tests.yaml").write_text(yaml.dump(asked))
    command = [require_binary("promtool"), "test", "rules", tmp_path / "tests.yaml"]
    tested = subprocess.run(command, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def _test(alert, series, expected):
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": LONG, "alertname": alert, "exp_alerts": expected}],
    }
