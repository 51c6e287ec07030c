"""What the chart's containers are told suffices: started here as processes, they answer the curl of
docs/kubernetes.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from app.local.redis_server import free_port
from tests.chart.installed import INSTALLED
from tests.chart.rendering import DEPLOY, ROOT
from tests.e2e.engines import Process
from tests.eventually import eventually
from tests.redis_servers import default_kind, require_redis

PAGE = (ROOT / "docs/kubernetes.md").read_text()


def container(part: str) -> dict[str, Any]:
    [one] = INSTALLED["default"].pods[part]["spec"]["containers"]
    return dict(one)


def environment(part: str, redis_port: int, port: int) -> dict[str, str]:
    """As Kubernetes would make it, on this machine. Of Secrets, each value is its own name."""
    made = {"KVROUTE_PORT": str(port)}
    for entry in container(part)["env"]:
        source = entry.get("valueFrom", {})
        if secret := source.get("secretKeyRef"):
            value = f"{secret['name']}-{secret['key']}"
        elif source:
            value = "127.0.0.1"
        else:
            value = re.sub(r"\$\((\w+)\)", lambda match: made[match[1]], entry["value"])
        value = value.replace("kvroute-redis:6379", f"127.0.0.1:{redis_port}")
        made[entry["name"]] = value.replace(":8081", f":{port}")
    return made


@contextmanager
def redis(port: int, folder: Path) -> Iterator[None]:
    (folder / "redis-server").symlink_to(require_redis(default_kind()))
    told = container("redis")
    command = [
        # In that order: this checkout may lie below /tmp.
        text.replace("/tmp", str(folder)).replace("/etc/kvroute", str(DEPLOY))
        for text in told["command"] + told["args"]
    ]
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    with subprocess.Popen(
        [*command, "--port", str(port)],
        env=environment("redis", port, port) | path,
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            url = environment("router", port, port)["REDIS_URL"]
            with Redis.from_url(url, retry=Retry(ConstantBackoff(0.1), 300)) as client:
                assert client.ping()
            yield
        finally:
            process.terminate()


@contextmanager
def started(part: str, redis_port: int) -> Iterator[str]:
    """The URL of a part of ours."""
    told = environment(part, redis_port, free_port())
    variables = [f"{name}={value}" for name, value in told.items()]
    command = ["env", *variables, sys.executable, "-m", "app.cli"]
    process = Process(*container(part)["args"][1:], command=command)
    try:
        yield process.url
    finally:
        process.end()


async def test_the_curl_of_the_page_is_answered(tmp_path: Path) -> None:
    [body] = re.findall(r"-d '(\{.*?\})'", PAGE)
    [(secret, key)] = re.findall(r"get secret (\S+) -o jsonpath='\{\.data\.(\w+)\}'", PAGE)
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(redis(port, tmp_path))
        stack.enter_context(started("worker", port))
        url = stack.enter_context(started("router", port))
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            await eventually(lambda: client.get("/readiness"), lambda ready: ready.is_success)
            headers = {"Authorization": f"Bearer {secret}-{key}"}
            answer = await client.post("/v1/chat/completions", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"]
            refused = await client.post("/v1/chat/completions", content=body)
            assert refused.status_code == 401
