"""Engines with an agent beside each, as processes of their own, and what both say of a prompt."""

import asyncio
import random
import re
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from threading import Thread

from app.core.settings.agent import EngineAgentSettings
from tests.fake_worker import NAMESPACE
from workers.engine_agent import serve as serve_agent

ROOT = Path(__file__).parents[2]


class Process:
    """A kvroute command, or another module; `url` is where it listens."""

    def __init__(self, *arguments, module="app.cli", command=None, cwd=ROOT):
        """command: another that is installed; None: the module, of this checkout."""
        self.popen = subprocess.Popen(
            [*(command or (sys.executable, "-m", module)), *arguments],
            cwd=cwd,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stderr is not None
        listening = (re.search(r"listening on (\S+)", line) for line in self.popen.stderr)
        self.url = next(found[1] for found in listening if found)

        # Else a process that writes much would wait for a reader.
        self.said = ""
        self._drain = Thread(target=self._read, daemon=True)
        self._drain.start()

    @contextmanager
    def ending(self):
        try:
            yield self
        finally:
            self.end()

    def _read(self):
        assert self.popen.stderr is not None
        self.said = self.popen.stderr.read()

    def end(self, number=signal.SIGTERM):
        self.popen.send_signal(number)
        with self.popen:
            self._drain.join(30)


@contextmanager
def engine(port=0, **options):
    """The stand-in for engines, which computes at once. port: 0 takes a free one. options: of its
    command."""
    chosen = {"port": port, "prefill_s": 0.0, "token_s": 0.0} | options
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    process = Process(*flags, module="tests.fakes.engine")
    with process.ending():
        yield process


@contextmanager
def agent(engine_url, redis_url, memory, worker_id="e", more=()):
    process = Process(
        "agent",
        f"--engine-url={engine_url}",
        f"--redis-url={redis_url}",
        f"--namespace={NAMESPACE}",
        f"--memory-folder={memory}",
        f"--worker-id={worker_id}",
        "--port=0",
        *more,
    )
    with process.ending():
        yield process


@asynccontextmanager
async def agent_here(engine_url, redis_url, memory, worker_id, **options):
    """Runs an agent in this process, a second of CPU cheaper. At the end it dies as if killed."""
    settings = EngineAgentSettings(
        redis_url=redis_url,
        namespace=NAMESPACE,
        engine_url=engine_url,
        worker_id=worker_id,
        memory_folder=str(memory),
        port=0,
        **options,
    )
    serving = asyncio.create_task(serve_agent(settings))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


class SharedPrompts:
    """Prompts that share prefixes, seeded."""

    def __init__(self, seed, longest=300):
        self._random = random.Random(seed)
        self._longest = longest
        self._told = []

    @property
    def last(self):
        return self._told[-1]

    def next(self):
        """A new prompt, or one told before that goes on or branches off."""
        choice = self._random
        begun = choice.choice(self._told) if self._told and choice.random() < 0.8 else []
        kept = begun[: choice.randrange(len(begun) + 1)] if begun else []
        more = [choice.randrange(5, 480) for _ in range(choice.randrange(1, 80))]
        prompt = [*kept, *more][-self._longest :] if not kept else [*kept, *more][: self._longest]
        self._told = [*self._told[-30:], prompt]
        return prompt


async def complete(engine, model, prompt):
    """How many tokens of the prompt the engine says that it reused."""
    asked = {"model": model, "prompt": list(prompt), "max_tokens": 3, "ignore_eos": True}
    answer = await engine.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


async def overlap(router, prompt, worker_id="e"):
    """How many blocks of the prompt the router says that the worker holds."""
    asked = {"token_ids": list(prompt), "reserve": False, "explain": True}
    answer = (await router.post("/v1/route", json=asked)).json()
    candidates = answer["candidates"]
    [found] = [c for c in candidates if c["worker_id"] == worker_id]
    return sum(found["overlap_blocks"].values())
