"""Containers of the chart need no more than they are told: started here as processes, they answer
the curl of docs/kubernetes.md, spread requests over two revisions, and serve several models whose
engines are found in pods."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
from aiohttp import web
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from app.local.redis_server import free_port
from tests.chart.installed import INSTALLED
from tests.chart.rendering import DEPLOY, ROOT
from tests.e2e.engines import Process, engine
from tests.eventually import eventually
from tests.redis_servers import default_kind, require_redis
from tests.workers.discovery.api_server import api_server, pod

PAGE = (ROOT / "docs/kubernetes.md").read_text()


def container(part, example="default"):
    """The last one of the pods of `part`: where there are two, the agent."""
    return dict(INSTALLED[example].pods[part]["spec"]["containers"][-1])


def environment(told, redis_port, port):
    """Returns the environment that Kubernetes would make. The value of a Secret is its name."""
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
def redis(port, folder):
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
def started(part, redis_port, example="default", **more):
    """The URL of a part of ours; in place of an engine and its agent, a simulated worker. more:
    variables that are other than the chart's; "": none."""
    told = container(part, example)
    variables = environment(told, redis_port, free_port()) | more
    given = [f"{name}={value}" for name, value in variables.items() if value]
    is_beside = told["name"] == "agent" and not part.endswith("agent")
    command = ["worker"] if is_beside else told["args"][1:]
    process = Process(*command, command=["env", *given, sys.executable, "-m", "app.cli"])
    try:
        yield process.url
    finally:
        process.end()


async def test_the_curl_of_the_page_is_answered(tmp_path):
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


async def test_a_tokenizer_that_cannot_be_fetched_leaves_a_router_that_serves_and_says_so(tmp_path):
    [fetching] = INSTALLED["split"].pods["router"]["spec"]["initContainers"]
    model, folder = "70b-4xh100", tmp_path / "tokenizer"
    folder.mkdir()
    shell, flag, script = fetching["command"]
    script = script.replace("/scripts/", f"{DEPLOY}/").replace("--retry 5", "--retry 0")
    nowhere = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    fetched = await asyncio.create_subprocess_exec(
        *(shell, flag, script, model, str(folder)), env=nowhere, stderr=subprocess.PIPE
    )
    _, said = await asyncio.wait_for(fetched.communicate(), 120)
    assert fetched.returncode == 0, said
    assert b"routers start without it" in said
    port = free_port()
    with ExitStack() as stack:
        stack.enter_context(redis(port, tmp_path))
        stack.enter_context(started("worker", port))
        named = {"KVROUTE_TOKENIZERS": f"{model}={folder}"}
        url = stack.enter_context(started("router", port, **named))
        headers = {"Authorization": "Bearer kvroute-keys-api"}
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:

            async def missing():
                asks = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
                answer = await client.post("/v1/chat/completions", json=asks | {"max_tokens": 1})
                ready = await client.get("/readiness")
                return str(ready.json()["missing"]) if answer.status_code == 200 else ""

            await eventually(missing, lambda found: f"tokenizer of {model}" in found)
            assert (await client.get("/readiness")).status_code == 200


async def test_two_revisions_get_requests_by_weights_that_change_without_a_restart(tmp_path):
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

            async def counts(num):
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


class StatefulSet:
    """A fake StatefulSet of 0 or 1 replicas: `put` starts its pod, `delete` ends it."""

    def __init__(self):
        self.replicas = 1
        self.lives = 0
        """How often it was scaled up."""

    def routes(self):
        path = "/apis/apps/v1/namespaces/default/statefulsets/chat/scale"
        pods = "/api/v1/namespaces/default/pods/{name}"
        return [
            web.get(path, self._told),
            web.patch(path, self._scale),
            web.patch(pods, self._marked),
        ]

    async def _told(self, _):
        scale = {"metadata": {"resourceVersion": "1"}, "spec": {"replicas": self.replicas}}
        return web.json_response(scale)

    async def _marked(self, request):
        return web.json_response({"metadata": {"name": request.match_info["name"]}})

    async def _scale(self, request):
        before, self.replicas = self.replicas, (await request.json())["spec"]["replicas"]
        if self.replicas < before:
            self.delete(f"chat-{self.lives}")
        elif self.replicas > before:
            self.lives += 1
            self.put(f"chat-{self.lives}")
        return await self._told(request)


def kubeconfig(server, folder):
    text = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(text))
    return str(file)


async def test_three_models_are_served_whose_engines_are_found_and_one_of_them_sleeps(tmp_path):
    names = {"chat": "Qwen/Qwen2.5-0.5B-Instruct", "code": "coder", "large": "large"}
    port, chat = free_port(), StatefulSet()
    async with api_server(*chat.routes()) as (api, configuration):
        with ExitStack() as stack:
            stack.enter_context(redis(port, tmp_path))
            urls = {
                name: stack.enter_context(engine(model=model, kind=kind)).url
                for (name, model), kind in zip(
                    names.items(), ("vllm", "sglang", "vllm"), strict=True
                )
            }
            group = {"leaderworkerset.sigs.k8s.io/name": "large"}
            index = "leaderworkerset.sigs.k8s.io/worker-index"
            there = {"namespace": "default"}
            chat.put = lambda uid: api.put(
                pod("chat-0", urls["chat"], uid, labels={"app": "chat"}, **there)
            )
            chat.delete = api.delete
            chat.put("chat-0")
            api.put(pod("code-0", urls["code"], labels={"app": "code"}, **there))
            api.put(pod("large-0", urls["large"], labels=group | {index: "0"}, **there))
            nobody = f"http://127.0.0.1:{free_port()}"
            api.put(pod("large-0-1", nobody, labels=group | {index: "1"}, **there))
            known = {
                "KUBECONFIG": kubeconfig(configuration.host, tmp_path),
                "KVROUTE_MEMORY_FOLDER": str(tmp_path),
                "KVROUTE_DRAIN_S": "1",
                "KVROUTE_KUBERNETES_NAMESPACE": "default",
            }
            planned = {name: text for name, text in known.items() if name.startswith("KUBE")}
            planned |= {"KVROUTE_KUBERNETES_NAMESPACE": "default"}
            soon = {"KVROUTE_INTERVAL_S": "1", "KVROUTE_GRACE_INTERVALS": "1"}
            started_parts = await asyncio.gather(
                *(
                    asyncio.to_thread(stack.enter_context, started(part, port, "models", **more))
                    for part, more in {
                        **{f"{name}-agent": known for name in names},
                        "chat-planner": planned | soon | {"KVROUTE_IDLE_S": "3"},
                        "router": {"KVROUTE_TOKENIZERS": "", "KVROUTE_SHOW_DECISION": "true"},
                    }.items()
                )
            )
            headers = {"Authorization": "Bearer kvroute-keys-api"}
            async with httpx.AsyncClient(
                base_url=started_parts[-1], timeout=60, headers=headers
            ) as client:

                async def served():
                    listed = (await client.get("/v1/models")).json()
                    return {each["id"] for each in listed["data"]}

                async def answer(model):
                    asks = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
                    done = await client.post("/v1/chat/completions", json=asks | {"model": model})
                    assert done.status_code == 200, done.text
                    return str(done.headers["x-kvroute-worker"])

                await eventually(served, lambda seen: seen == set(names.values()))
                workers = {name: await answer(model) for name, model in names.items()}
                assert workers == {"chat": "chat-0:0", "code": "code-0:0", "large": "large-0:0"}

                async def asleep():
                    listed = (await client.get("/v1/models")).json()
                    return {each["id"] for each in listed["data"] if each["asleep"]}

                await eventually(asleep, lambda seen: seen == {names["chat"]})
                assert chat.replicas == 0
                assert await answer(names["code"]) == "code-0:0"
                # While its last worker is leaving, there is none to answer.
                asks = {"messages": [{"role": "user", "content": "hi"}], "model": names["chat"]}
                body = asks | {"max_tokens": 2}
                woken = partial(client.post, "/v1/chat/completions", json=body)
                done = await eventually(woken, lambda answer: answer.status_code == 200)
                assert (done.headers["x-kvroute-worker"], chat.lives) == ("chat-0:0", 1)
