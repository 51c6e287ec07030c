"""LiteLLM as a proxy in front, whose deployment no answer of ours puts into cool-down:
with_litellm_proxy.py URL MODEL"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import openai

URL, MODEL = sys.argv[1:]
KEY = "sk-1234567890abcdef1234567890abcdef"
USER = {"role": "user", "content": "hello"}
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def serving(url, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"{url}/health/liveliness", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError("the proxy does not serve")


def check(client):
    whole = client.chat.completions.create(model="m", messages=[USER])
    chunks = [*client.chat.completions.create(model="m", messages=[USER], stream=True)]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    called = client.chat.completions.create(model="m", messages=[USER], tools=[TOOL])
    assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)
    assert client.responses.create(model="m", input="hello").output_text
    assert client.embeddings.create(model="m", input="a").data[0].embedding
    # What the engine does not do, or lacks a path for, is a matter of the request alone.
    for _ in range(8):
        try:
            client.chat.completions.create(model="m", messages=[USER], logprobs=True)
        except openai.BadRequestError:
            pass
        else:
            raise AssertionError("log probabilities are not given")
        ranking = {"model": "m", "query": "x", "documents": ["y"]}
        with contextlib.suppress(openai.APIStatusError):
            client.post("/rerank", cast_to=object, body=ranking)
    assert client.chat.completions.create(model="m", messages=[USER]).choices


with tempfile.TemporaryDirectory() as folder:
    deployment = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "any"}
    models = [{"model_name": "m", "litellm_params": deployment}]
    settings = {"num_retries": 0, "allowed_fails": 0, "cooldown_time": 600}
    config = Path(folder, "config.yaml")
    config.write_text(json.dumps({"model_list": models, "router_settings": settings}))
    port = free_port()
    process = subprocess.Popen(
        [Path(sys.executable).with_name("litellm"), "--config", config, "--port", str(port)],
        cwd=folder,
        env=os.environ | {"LITELLM_MASTER_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=sys.stderr,
    )
    try:
        serving(f"http://127.0.0.1:{port}", process)
        url = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
            check(client)
    finally:
        process.terminate()
        process.wait(30)
