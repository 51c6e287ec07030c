"""What the chart's containers are told suffices: started here as processes, they answer the curl of
docs/kubernetes.md, and spread requests over two revisions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
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


def container(part: str, example: str = "default") -> dict[str, Any]:
    """The last one of the pods of `part`: where there are two, the agent."""
    return dict(INSTALLED[example].pods[part]["spec"]["containers"][-1])


def environment(told: dict[str, Any], redis_port: int, port: int) -> dict[str, str]:
    """As Kubernetes would make it, on this machine. Of Secrets, each value is its own name."""
    made = {"KVROUTE_PORT": str(port)}
    for entry in told["env"]:
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
        env=environment(told, port, port) | path,
        stdout=subprocess.DEVNULL,
    ) as process:
        try:
            url = environment(container("router"), port, port)["REDIS_URL"]
            with Redis.from_url(url, retry=Retry(ConstantBackoff(0.1), 300)) as client:
                assert client.ping()
            yield
        finally:
            process.terminate()


@contextmanager
def started(part: str, redis_port: int, example: str = "default", **more: str) -> Iterator[str]:
    """The URL of a part of ours; in place of an engine and its agent, a simulated worker. more:
    variables that are other than the chart's; "": none."""
    told = container(part, example)
    variables = environment(told, redis_port, free_port()) | more
    given = [f"{name}={value}" for name, value in variables.items() if value]
    command = told["args"][1:] if told["name"] != "agent" else ["worker"]
    process = Process(*command, command=["env", *given, sys.executable, "-m", "app.cli"])
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


async def test_two_revisions_get_requests_by_weights_that_change_without_a_restart(
    tmp_path: Path,
) -> None:
    [made] = [
        each
        for each in INSTALLED["canary"].of_kind("ConfigMap")
        if each["metadata"]["name"] == "kvroute-router"
    ]
    [(name, text)] = made["data"].items()
    file, port = tmp_path / name, free_port()
    file.write_text(text)
    with ExitStack() as stack:
        stack.enter_context(redis(port, tmp_path))
        for part in ("engine", "next"):
            variables = {"KVROUTE_WORKER_ID": part, "KVROUTE_WORKER_KEY": "kvroute-keys-worker"}
            stack.enter_context(started(part, port, "canary", KVROUTE_ADDRESS="", **variables))
        variables = {"KVROUTE_TOKENIZERS": "", "KVROUTE_SHOW_DECISION": "true"}
        url = stack.enter_context(
            started("router", port, "canary", KVROUTE_CONFIG=str(file), **variables)
        )
        headers = {"Authorization": "Bearer kvroute-keys-api"}
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:

            async def counts(num: int) -> Counter[str]:
                asks = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
                answers = [await client.post("/v1/chat/completions", json=asks) for _ in range(num)]
                assert {each.status_code for each in answers} == {200}
                return Counter(each.headers["x-kvroute-worker"] for each in answers)

            await eventually(lambda: client.get("/readiness"), lambda ready: ready.is_success)
            await eventually(lambda: counts(50), lambda found: len(found) == 2)
            # Of 300, one in ten: 30, and 3 in a million times less than 8 or more than 55.
            assert 8 <= (await counts(300))["next:0"] <= 55
            file.write_text(text.replace("default=9", "default=0"))
            await eventually(lambda: counts(20), lambda found: found == {"next:0": 20})
