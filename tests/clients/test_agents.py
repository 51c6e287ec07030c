"""Coding agents, for a few turns with a call of a tool each: what routers make of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients.cluster import cluster
from tests.clients.comply import CLIENTS

pytestmark = [
    pytest.mark.clients,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm"),
]

MODEL = "llama"
PACKAGES = CLIENTS / "node" / "node_modules"
NODE = PACKAGES / "node/bin/node"
FIRST, *LATER = "What does README.md say?", "And now?", "And in the end?"
CACHED = 0.75
"""Share of the prompts' tokens: of six prompts of a conversation nearly five, and none that others
begin with."""
DEADLINE_S = 300


@dataclass(frozen=True, slots=True)
class Work:
    environment: Mapping[str, str]
    commands: Sequence[Sequence[str | Path]]


def claude(url, home):
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "any",
        "ANTHROPIC_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    said = (NODE, PACKAGES / "@anthropic-ai/claude-code/cli-wrapper.cjs", "-p")
    later = [(*said, question, "--continue") for question in (*LATER, "/context")]
    return Work(environment, [(*said, FIRST), *later, (*said, FIRST, "--tools", "")])


def codex(url, home):
    provider = f'{{name="kvroute",base_url="{url}/v1",env_key="KEY",wire_api="responses"}}'
    settings = {"model": MODEL, "model_provider": "kvroute", "model_providers.kvroute": provider}
    flags = [flag for name, value in settings.items() for flag in ("-c", f"{name}={value}")]
    said = (NODE, PACKAGES / "@openai/codex/bin/codex.js", "exec", *flags)
    later = [(*said, "resume", "--last", question) for question in LATER]
    return Work({"CODEX_HOME": str(home), "KEY": "any"}, [(*said, FIRST), *later])


def opencode(url, home):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "any"},
        "models": {MODEL: {}},
    }
    named = {"model": f"kvroute/{MODEL}", "small_model": f"kvroute/{MODEL}"}
    config = {"provider": {"kvroute": provider}, "autoupdate": False, **named}
    (home / "opencode.json").write_text(json.dumps(config))
    said = (PACKAGES / ".bin/opencode", "run")
    later = [(*said, "--continue", question) for question in LATER]
    return Work({"OPENCODE_CONFIG": str(home / "opencode.json")}, [(*said, FIRST), *later])


Agent = Callable[[str, Path], Work]


def requests_of(agent, folder, *options, engines=2):
    """The lines of the access log about what an agent asked for."""
    home, project, log = folder / "home", folder / "project", folder / "log"
    for made in (home, project):
        made.mkdir()
    (project / "README.md").write_text("# The weather\n")
    subprocess.run(["git", "init", "--quiet", project], check=True)
    with cluster(log, "--access-log", *options, engines=engines, model=MODEL) as url:
        work = agent(url, home)
        for command in work.commands:
            done = subprocess.run(
                command,
                cwd=project,
                env={"HOME": str(home), "PATH": os.environ["PATH"], **work.environment},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
            )
            assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["path"] != "/v1/models"]


def cached_share(requests):
    answered = [line for line in requests if line["output_tokens"]]
    assert len(answered) >= 2 * len((FIRST, *LATER)), "each turn has a call of a tool"
    cached = sum(line["cached_tokens"] for line in answered)
    return float(cached) / sum(line["prompt_tokens"] for line in answered)


@pytest.mark.parametrize("agent", [claude, codex, opencode])
def test_what_an_agent_sends_is_tokenized_here_and_meets_its_cache(agent, tmp_path):
    requests = requests_of(agent, tmp_path)
    assert {(line["status"], line["outcome"]) for line in requests} == {(200, "ok")}
    assert {line["tokens_from"] for line in requests if line["output_tokens"]} == {"router"}
    assert cached_share(requests) > CACHED


def test_that_share_takes_a_policy_that_minds_the_cache(tmp_path):
    heedless = ("--policy", "round_robin", "--session-affinity", "0")
    assert cached_share(requests_of(codex, tmp_path, *heedless, engines=4)) < CACHED
