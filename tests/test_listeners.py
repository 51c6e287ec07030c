"""docs/front-door.md: it has every port that is opened, and bounds as the code has them. That each
listener asks for what it says there is tested in tests/e2e/test_listeners.py."""

import re
from pathlib import Path

import pytest
import yaml

from app.console.routes import MAX_BODY_BYTES as CONSOLE_BODY_BYTES
from app.core.places import TIMES_WHAT_IS_LEFT
from app.core.settings.router import RouterSettings
from app.http import body, held, protocol
from tests.chart.rendering import golden
from workers.kv.transfer import server, tcp
from workers.server import chat_paths

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/front-door.md").read_text().split("## What listens")[1]
ROWS = {
    cells[0]: cells[1:]
    for line in PAGE.splitlines()
    if line.startswith("| ") and (cells := [cell.strip() for cell in line[1:-1].split("|")])
    if cells[0] not in ("listener", "---")
}
LISTEN = re.compile(r"(?<!def )\b(?:listen|_bind|bind|create_server|start_server)\(")
OPENED = {
    "app/cli.py": "router",
    "app/gateway/grpc_server.py": "picker, gateways",
    "app/gateway/processor.py": "picker, gateways",
    "app/planner/main.py": "planner",
    "app/local/cluster.py": "balancer",
    "app/local/redis_server.py": "Redis of `kvroute up`",
    "workers/main.py": "worker",
    "workers/engine_agent.py": "agent",
    "workers/kv/transfer/kv_lease.py": "worker, KV",
}
"""Modules that open a port, and a row that says of it."""
DEPLOYED = {6379, 8000, 8080, 8081, 8082, 8083, 9002}
OUTWARD = {53, 443, 6443}


def test_every_module_that_opens_a_port_has_a_row():
    found = {
        str(path.relative_to(ROOT))
        for package in ("app", "workers")
        for path in (ROOT / package).rglob("*.py")
        if LISTEN.search(path.read_text()) and path.name != "server.py"
    }
    assert found == OPENED.keys()
    assert set(OPENED.values()) <= ROWS.keys()


def test_the_bounds_are_those_of_the_code():
    ports, console = ROWS["worker, KV"], ROWS["router `/console/api/`"]
    assert f"{tcp.MAX_FRAME_BYTES >> 10} KiB in {server.ASKING_S:g} s" in ports[-1]
    assert f"{server.MAX_ASKING} connections" in ports[-1]
    assert f"{tcp.MAX_SENDING} transfers" in ports[-1]
    assert f"{tcp.WHOLE_S / 60:g} minutes" in ports[-1]
    assert f"bodies of {CONSOLE_BODY_BYTES >> 10} KiB" in console[-1]
    assert f"bodies of {chat_paths.MAX_BODY_BYTES >> 20} MiB" in ROWS["worker"][-1]
    assert f"headers in {protocol.HEAD_TIMEOUT_S:g} s" in ROWS["picker, gateways"][-1]
    assert f"a body in {body.BODY_TIMEOUT_S:g} s" in ROWS["picker, gateways"][-1]
    assert f"{protocol.MAX_HEAD_BYTES >> 10} KiB of headers" in PAGE
    assert f"{protocol.MAX_URL_BYTES >> 10} KiB of URL" in PAGE
    assert f"within {protocol.HEAD_TIMEOUT_S:g} s" in PAGE
    rate = f"its first {body.BODY_TIMEOUT_S:g} s {body.LEAST_BYTES_PER_S >> 10} KB a second"
    assert f"of a body something each {body.BODY_TIMEOUT_S:g} s, and after {rate}" in PAGE
    assert f"{protocol.MAX_CONNECTIONS:,} at most" in PAGE
    assert f"A body of {held.SMALL_BYTES >> 10} KiB is always taken" in PAGE
    assert TIMES_WHAT_IS_LEFT == 3
    assert "more than three times what is left" in PAGE
    assert RouterSettings().host == "127.0.0.1"


def test_the_balancers_bounds_are_those_of_their_files():
    for name, row in (("haproxy.cfg", "balancer"), ("cells.cfg", "cells' balancer")):
        text = (ROOT / "deploy" / name).read_text()
        most = re.findall(r"presetenv KVROUTE_BALANCER_MAXCONN(?:_PER_CLIENT)? (\d+)", text)
        assert [f"{int(number):,}" for number in most] == ["8,000", "6,000"]
        assert ROWS[row][-1] in (
            "headers within 30 s; 8,000 connections, 6,000 of one address",
            "the same",
        )


def test_the_pickers_bounds_are_those_of_the_code():
    messages = pytest.importorskip("app.gateway.messages")
    grpc_server = pytest.importorskip("app.gateway.grpc_server")
    processor = pytest.importorskip("app.gateway.processor")
    picker = ROWS["picker, gateways"][-1]
    assert f"messages of {grpc_server.MAX_BYTES >> 20} MiB" in picker
    assert f"{messages.MAX_HEAD_BYTES >> 10} KiB for headers" in picker
    assert f"{processor.MAX_SILENT:,} calls" in picker


def test_the_gateways_bounds_are_those_of_its_file():
    text = (ROOT / "deploy/envoy.yaml").read_text()
    head_kb, connections = (
        int(re.findall(rf"{name}: (\d+)", text)[0])
        for name in ("max_request_headers_kb", "max_connections")
    )
    assert ROWS["Envoy of `envoy.yaml`"][-1] == (
        f"{head_kb} KiB of headers, within 10 s; {connections:,} connections"
    )
    assert "request_headers_timeout: 10s" in text


def test_the_deployment_files_open_the_ports_of_the_page_alone():
    found = {
        port
        for example in ("default", "split", "gateway")
        for document in yaml.safe_load_all(golden(example).read_text())
        for port in _ports(document)
    }
    assert found <= DEPLOYED | OUTWARD
    compose = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
    published = {
        name: service["ports"]
        for name, service in compose["services"].items()
        if "ports" in service
    }
    assert published == {"balancer": ["127.0.0.1:8080:8080"]}
    for port in DEPLOYED:
        assert str(port) in PAGE


def _ports(value):
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in ("port", "containerPort", "hostPort", "nodePort") and isinstance(inner, int):
                yield inner
            yield from _ports(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _ports(inner)
