"""The alerts of planners and namespaces fire on what they are for, and on nothing near it."""

import subprocess
from pathlib import Path

import yaml

from tests.redis_servers import require_binary

HERE = Path(__file__).parent
ALERTS = HERE.parents[1] / "deploy/alerts.yaml"
TESTED = {"kvroute-namespaces", "kvroute-planner"}


def test_each_alert_fires_on_what_it_is_for_and_on_nothing_near_it():
    command = [require_binary("promtool"), "test", "rules", "alerts.yaml"]
    tested = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_is_tested_both_ways():
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    alerts = {
        rule["alert"] for group in groups if group["name"] in TESTED for rule in group["rules"]
    }
    tests = yaml.safe_load((HERE / "alerts.yaml").read_text())["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in cases if "exp_alerts" in case} == alerts
    assert {case["alertname"] for case in cases if "exp_alerts" not in case} == alerts
