"""The worth of reuse on a real engine: a Llama with random weights, on a CPU or a GPU.

With one worker: the time to first token of prompts that share most of their tokens with one
computed earlier, by the tier that holds the shared tokens, against prompts that share nothing.
What KV of another worker is worth: loadtest.bench_transfer.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import aiohttp
import click
import numpy as np
import orjson
from rich import box
from rich.table import Table

from app.core.settings.router import RouterSettings
from app.http.server import run
from app.local.cluster import Cluster
from loadtest.client import ClusterClient
from loadtest.command import Command, Console, make_folder, option, save
from loadtest.devices import BLOCK_SIZE, SIZES, Size, device_option, model_option, torch_worker
from loadtest.traces import pseudo_random_tokens

MAX_PROMPTS = 30
"""Enough to fill device and host memory, and to push some prompts to disk."""
ROUTER_TIMEOUT_S = 10.0
TIERS = "device", "host", "disk"


class DemoPrompts:
    """Prompts for one worker: fresh ones, and ones that share tokens with one that it computed."""

    def __init__(self, size: Size) -> None:
        self._size = size
        self.stems: list[int] = []
        """Numbers of the computed prompts that no other prompt shares tokens with yet."""
        self._made = 0

    def fresh(self) -> bytes:
        self.stems.append(self._made)
        return self._prompt(self._made)

    def sharing(self, stem: int) -> bytes:
        """A prompt that begins like `stem` and ends in tokens of its own."""
        return self._prompt(stem)

    def _prompt(self, stem: int) -> bytes:
        own = self._made
        self._made += 1
        tokens, shared = self._size.prompt_tokens, self._size.shared_tokens
        positions = np.arange(tokens, dtype=np.uint64)
        positions[:shared] += np.uint64(stem * tokens)
        positions[shared:] += np.uint64(own * tokens)
        return pseudo_random_tokens(positions, seed=0).astype("<u4").tobytes()


@contextmanager
def torch_cluster(device: str, model: str | None) -> Iterator[Cluster]:
    """A worker behind a router; its disk pool ends with it."""
    with TemporaryDirectory(prefix="kvroute-disk-") as folder:
        pool_tokens = SIZES[device].pool_tokens
        settings = torch_worker(
            device,
            model,
            pool_tokens,
            host_pool_tokens=pool_tokens,
            disk_pool_tokens=SIZES[device].disk_pools * pool_tokens,
            disk_folder=folder,
            log_level="warning",
        )
        router = RouterSettings(log_level="warning")
        with Cluster(num_workers=1, num_replicas=1, router=router, worker=settings) as cluster:
            yield cluster


async def measure_tiers(base_url: str, rounds: int, size: Size) -> dict[str, list[float]]:
    """Seconds to the first token, by the tier of the shared tokens; `cold`: nothing was shared."""
    prompts = DemoPrompts(size)
    times: dict[str, list[float]] = {"cold": [], **{tier: [] for tier in TIERS}}
    timeout = aiohttp.ClientTimeout(total=ROUTER_TIMEOUT_S)
    async with (
        ClusterClient(base_url) as client,
        aiohttp.ClientSession(base_url, timeout=timeout) as session,
    ):
        await _ttft_s(client, prompts.fresh(), {})  # the first one finds torch itself cold
        for _ in range(MAX_PROMPTS + rounds):
            wanted = [tier for tier in TIERS if len(times[tier]) < rounds]
            if not wanted:
                break
            times["cold"] += await _ttft_s(client, prompts.fresh(), {})
            # One tier after another, so that prompts remain that can move to lower tiers.
            expected = {wanted[0]: size.shared_tokens}
            for stem in prompts.stems:
                prompt = prompts.sharing(stem)
                if await _held(session, prompt) == expected:
                    prompts.stems.remove(stem)
                    times[wanted[0]] += await _ttft_s(client, prompt, expected)
                    break
    missing = ", ".join(name for name, seconds in times.items() if len(seconds) < rounds)
    if missing:
        raise click.ClickException(f"the worker did not hold enough prompts whole in: {missing}")
    return times


async def _held(session: aiohttp.ClientSession, prompt: bytes) -> dict[str, int]:
    """Tokens of a prompt that the worker holds, by tier, as the router sees them."""
    async with session.post(
        "/v1/route",
        params={"reserve": "false"},
        data=prompt,
        headers={"content-type": "application/octet-stream"},
        raise_for_status=True,
    ) as response:
        overlap = orjson.loads(await response.read())["overlap_blocks"]
    return {tier: n * BLOCK_SIZE for tier, n in overlap.items() if n}


async def _ttft_s(client: ClusterClient, prompt: bytes, expected: dict[str, int]) -> list[float]:
    """Seconds to the first token; empty if the worker, by tier, held other tokens than expected.

    Blocks may move to lower tiers between the router's lookup and the request.
    """
    outcome = await client.send(f"demo-{uuid.uuid4().hex}", lambda: prompt, output_tokens=1)
    if outcome.first_token_s is None:
        raise click.ClickException(f"no answer: {outcome.error}")
    held = {tier: n for tier, n in outcome.cached_tokens_by_tier.items() if n}
    return [outcome.first_token_s - outcome.sent_s] if held == expected else []


def tiers_table(times: dict[str, list[float]], size: Size) -> Table:
    tokens, shared = size.prompt_tokens, size.shared_tokens
    cells = Table(
        box=box.SIMPLE_HEAD,
        title=f"Time to first token of {tokens:,} tokens, one at a time",
        caption=f"{shared:,} of them ({shared / tokens:.1%}) are shared. If "
        f"reuse cost nothing and all tokens the same, {bound(size):.1f} times: the bound. Later "
        "tokens cost more, as they attend to more.",
    )
    for name in ("shared part from", "median", "times faster", "requests"):
        cells.add_column(name, justify="right" if name != "shared part from" else "left")
    for name, seconds in times.items():
        cells.add_row(
            name, f"{median(seconds):.3f} s", f"{speedup(times, name):.1f}", str(len(seconds))
        )
    return cells


def bound(size: Size) -> float:
    return size.prompt_tokens / (size.prompt_tokens - size.shared_tokens)


def speedup(times: dict[str, list[float]], name: str) -> float:
    return median(times["cold"]) / median(times[name])


@click.command(cls=Command)
@device_option
@model_option
@option("--rounds", 5, "Prompts of each kind.")
@option(
    "--out", Path("out"), "Folder for demo-torch.json.", click.Path(path_type=Path, file_okay=False)
)
def main(
    device: str,
    model: str | None,
    rounds: int,
    out: Path,
) -> None:
    """A torch worker on this machine: hits from each tier against misses."""
    make_folder(out)
    console = Console()
    size = SIZES[device]
    console.print(f"one worker, model {model or size.model} with random weights, on {device}")
    with torch_cluster(device, model) as cluster:
        times = run(measure_tiers(cluster.balancer_url, rounds, size))
    console.print(tiers_table(times, size))
    file = out / "demo-torch.json"
    tiers = {name: {"ttft_s": s, "times_faster": speedup(times, name)} for name, s in times.items()}
    results = {
        "model": model or size.model,
        "bound": bound(size),
        "tiers": tiers,
    }
    save(results, file)
    console.print(f"Also in {file}")


if __name__ == "__main__":
    main()
