"""A client's checks of three APIs find no more wrong through the front door than on vLLM alone: see
`make test-vllm`."""

import asyncio
import json
from contextlib import ExitStack

import httpx
import pytest

from tests.door.conftest import until_serving
from tests.e2e.engines import Process, agent
from tests.engines.vllm_server import ANSWER_S, MODEL, VENV, vllm_servers
from tests.fake_worker import NAMESPACE

FORMATS = ("openai-chat", "open-responses", "anthropic")
SHORT = ("--override-generation-config", '{"max_new_tokens": 64, "temperature": 0}')
"""The model does not end its answers by itself, and they should be the same twice."""
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(7200)]


async def checked(url, form):
    running = await asyncio.create_subprocess_exec(
        *(VENV / "bin" / "llm-comply", "run", "--json", "--format", form, "--model", MODEL),
        *("--base-url", f"{url}/v1", "--api-key", "none", "--timeout", str(int(ANSWER_S))),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await running.communicate()
    results = json.loads(said)["results"]
    # Behind the field is what it was, which the model makes up.
    return {one["id"]: {e.partition(":")[0] for e in one.get("errors", ())} for one in results}


async def test_nothing_is_wrong_through_the_door_that_is_not_on_vllm_alone(
    one_redis_server, tmp_path
):
    url = one_redis_server.url
    with ExitStack() as stack:
        [engine] = stack.enter_context(
            vllm_servers(tmp_path, "a", blocks=2000, more=(*SHORT, *TOOLS))
        )
        stack.enter_context(agent(engine.url, url, tmp_path / "memory", "a"))
        router = Process("router", f"--redis-url={url}", f"--namespace={NAMESPACE}", "--port=0")
        stack.callback(router.end)
        async with httpx.AsyncClient(base_url=router.url, timeout=ANSWER_S) as http:
            await until_serving(http, 1)
        passed, worse = [], {}
        for form in FORMATS:
            alone, through = await checked(engine.url, form), await checked(router.url, form)
            passed += [name for name, wrong in alone.items() if not wrong]
            worse |= {name: found for name in alone if (found := through[name] - alone[name])}
        assert worse == {}
        assert passed
