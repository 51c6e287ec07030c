"""Each connector on the real thing, but for Kubernetes: an API server over HTTP that can refuse."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes_asyncio import client

from app.core.errors import ConfigError
from app.core.roles import Role
from app.local.child import running_workers, stop_workers
from app.planner.connectors.base import ConnectorError, ExecConnector, Local
from app.planner.connectors.kubernetes import DELETION_COST, FIRST, Kubernetes
from tests.edge.conftest import started_replica
from tests.eventually import eventually
from tests.fake_worker import NAMESPACE

BOTH, MORE = Role.BOTH, (3, "slo_missed")


def script(tmp_path, text):
    file = tmp_path / "scale.py"
    file.write_text(f"import json, sys\norder = json.load(sys.stdin)\n{text}")
    return f"{sys.executable} {file}"


async def test_a_command_is_given_the_order_as_json(tmp_path):
    told = tmp_path / "told"
    command = ExecConnector(
        script(tmp_path, f"open({str(told)!r}, 'a').write(json.dumps(order) + '\\n')")
    )
    await command.add(BOTH, 1, *MORE)
    await command.remove("w1", Role.DECODE, 2)
    assert [orjson.loads(line) for line in told.read_text().splitlines()] == [
        {"action": "add", "count": 1, "role": "both", "desired": 3, "reason": "slo_missed"},
        {"action": "remove", "count": 1, "worker": "w1", "role": "decode", "desired": 2},
    ]


async def test_a_command_that_fails_says_what_it_printed(tmp_path):
    with pytest.raises(ConnectorError, match="ended with 3: no quota"):
        await ExecConnector(
            script(tmp_path, "print('no quota', file=sys.stderr); sys.exit(3)")
        ).add(BOTH, 1, *MORE)
    with pytest.raises(ConnectorError, match="No such file"):
        await ExecConnector("/nowhere/scale --up").add(BOTH, 1, *MORE)


async def test_a_command_that_takes_too_long_is_killed(tmp_path):
    late = tmp_path / "late"
    text = f"import time; time.sleep(1); open({str(late)!r}, 'w')"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await ExecConnector(script(tmp_path, text)).add(BOTH, 1, *MORE)
    await asyncio.sleep(1)
    assert not late.exists()


@pytest.mark.parametrize("command", ["", "  ", "scale 'up"])
def test_a_command_that_cannot_be_run_is_refused_at_the_start(command):
    with pytest.raises(ConfigError, match="exec_command"):
        ExecConnector(command)


async def test_local_workers_outlive_the_planner_and_are_found_by_the_next(
    one_redis_server, tmp_path
):
    def connector():
        return Local("--speedup=100", tmp_path / "own", one_redis_server.url, NAMESPACE)

    try:
        async with started_replica(one_redis_server.url) as replica:

            async def workers():
                listed = (await replica.get("/v1/workers")).json()
                return sorted(worker["worker_id"] for worker in listed.get("workers", []))

            await connector().add(BOTH, 2, *MORE)
            both = await eventually(workers, lambda seen: len(seen) == 2, within_s=30)
            assert sorted(running_workers(tmp_path / "own")) == both
            await connector().remove(both[0], BOTH, 1)
            await eventually(workers, lambda seen: seen == both[1:], within_s=30)
            with pytest.raises(ConnectorError, match="was not started by a planner"):
                await connector().remove("w9", BOTH, 0)
    finally:
        await asyncio.to_thread(stop_workers, tmp_path / "own")
    assert running_workers(tmp_path / "own") == {}


async def test_a_worker_that_ends_as_it_is_to_be_stopped_is_stopped(tmp_path, monkeypatch):
    ended = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await ended.wait()
    found = {"auto-1": ended.pid}
    monkeypatch.setattr("app.planner.connectors.base.running_workers", lambda _: found)
    await Local("", tmp_path, "redis://127.0.0.1", NAMESPACE).remove("auto-1", BOTH, 1)


async def test_a_worker_that_cannot_be_noted_does_not_run_on(tmp_path, monkeypatch):
    pids = list[int]()
    spawn = os.posix_spawn
    monkeypatch.setattr(os, "posix_spawn", lambda *a, **o: pids.append(spawn(*a, **o)) or pids[0])
    monkeypatch.setattr("secrets.token_hex", lambda _: "1")
    (tmp_path / "auto-1.pid").mkdir()
    with pytest.raises(ConnectorError, match="worker auto-1 is not noted: Is a directory"):
        await Local("", tmp_path, "redis://127.0.0.1:1", NAMESPACE).add(BOTH, 1, *MORE)
    _, status = await asyncio.to_thread(os.waitpid, pids[0], 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


async def test_a_number_that_another_process_has_now_is_left_alone(tmp_path):
    (tmp_path / "auto-1.pid").write_text("1")
    (tmp_path / "auto-2.pid").write_text("x")
    (tmp_path / "auto-3.pid").write_bytes(b"\xff")
    (tmp_path / "auto-4.pid").symlink_to("one-that-another-planner-has-just-forgotten")
    assert running_workers(tmp_path) == {}
    assert os.listdir(tmp_path) == []


def test_flags_that_cannot_be_split_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="worker_flags"):
        Local("--x 'y", tmp_path, "redis://127.0.0.1", NAMESPACE)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="local_folder"):
        Local("", tmp_path / "file" / "own", "redis://127.0.0.1", NAMESPACE)


MERGES = ("application/merge-patch+json", "application/strategic-merge-patch+json")


@dataclass
class ApiServer:
    """One Deployment `w` of four pods. status: of the next answers to PATCH; 0: none comes."""

    replicas: int = 4
    version: int = 7
    status: int = 200
    calls: list[tuple[str, str, Any]] = field(default_factory=list)

    async def handle(self, request):
        body = orjson.loads(await request.read() or b"null")
        self.calls.append((request.method, request.path, body))
        if request.method == "PATCH":
            if request.content_type not in MERGES:
                return web.json_response({"message": request.content_type}, status=415)
            if self.status == 0:
                await asyncio.sleep(60)
            if self.status != 200:
                return web.json_response({"message": "no"}, status=self.status)
            if request.path.endswith("/scale"):
                if body["metadata"]["resourceVersion"] != str(self.version):
                    return web.json_response({"message": "conflict"}, status=409)
                self.replicas = body["spec"]["replicas"]
                self.version += 1
        scale = {
            "kind": "Scale",
            "metadata": {"name": "w", "resourceVersion": str(self.version)},
            "spec": {"replicas": self.replicas},
        }
        return web.json_response(scale if request.path.endswith("/scale") else {"kind": "Pod"})


@pytest.fixture
async def api():
    server = ApiServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as http:
        configuration = client.Configuration(host=str(http.make_url("")).rstrip("/"))
        yield server, Kubernetes("deployment/w", "prod", configuration, "statefulset/p")


SCALE = "/apis/apps/v1/namespaces/prod/deployments/w/scale"


async def test_a_deployment_is_scaled_from_what_it_is_now(api):
    server, kubernetes = api
    await kubernetes.add(BOTH, 2, *MORE)
    assert server.replicas == 6
    server.replicas, server.version = 3, 20  # somebody else
    await kubernetes.add(BOTH, 1, *MORE)
    assert server.replicas == 4
    assert [path for _, path, _ in server.calls] == [SCALE] * 4


async def test_the_pod_that_leaves_is_marked_before_the_deployment_shrinks(api):
    server, kubernetes = api
    await kubernetes.remove("w-abc", BOTH, 3)
    marked, read, patched = server.calls
    assert marked == (
        "PATCH",
        "/api/v1/namespaces/prod/pods/w-abc",
        {"metadata": {"annotations": {DELETION_COST: FIRST}}},
    )
    assert read[:2] == ("GET", SCALE)
    assert patched[2]["spec"] == {"replicas": 3}


async def test_workers_that_prefill_are_of_a_scale_of_their_own(api):
    server, kubernetes = api
    await kubernetes.add(Role.PREFILL, 1, *MORE)
    await kubernetes.remove("p-3", Role.PREFILL, 3)
    await kubernetes.add(Role.DECODE, 1, *MORE)
    scales = [path for _, path, _ in server.calls if path.endswith("/scale")]
    assert scales == ["/apis/apps/v1/namespaces/prod/statefulsets/p/scale"] * 4 + [SCALE] * 2


@pytest.mark.parametrize("status", [403, 404, 409, 500])
async def test_what_the_api_server_refuses_is_said(api, status):
    server, kubernetes = api
    server.status = status
    with pytest.raises(ConnectorError, match=f"kubernetes: {status}"):
        await kubernetes.add(BOTH, 1, *MORE)
    with pytest.raises(ConnectorError, match=f"kubernetes: {status}"):
        await kubernetes.remove("w-abc", BOTH, 3)
    assert server.replicas == 4


async def test_an_api_server_that_does_not_answer_is_given_up_at_the_deadline(api):
    server, kubernetes = api
    server.status = 0
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await kubernetes.add(BOTH, 1, *MORE)


@pytest.mark.parametrize(
    ("role", "said"), [(BOTH, "kubernetes: "), (Role.PREFILL, "no kubernetes_prefill_scale")]
)
async def test_an_api_server_or_a_scale_that_is_not_there_is_said(role, said):
    away = client.Configuration(host="http://127.0.0.1:1")
    with pytest.raises(ConnectorError, match=said):
        await Kubernetes("deployment/w", "prod", away).add(role, 1, *MORE)


@pytest.mark.parametrize(
    ("setting", "scales"),
    [
        *(("kubernetes_scale", (scale,)) for scale in ("", "w", "job/w", "deployment/")),
        ("kubernetes_prefill_scale", ("deployment/w", "job/w")),
    ],
)
def test_what_cannot_be_scaled_is_refused_at_the_start(setting, scales):
    with pytest.raises(ConfigError, match=setting):
        Kubernetes(scales[0], "prod", client.Configuration(), *scales[1:])
