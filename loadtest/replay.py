"""Plays a recorded trace against a live cluster, once per policy, and reports.

Arrivals follow the trace whatever the cluster does (open loop). Where the trace says so, a request
instead follows the previous answer after a think time (closed loop).

The cluster is not started anew for each policy. What the ones before left in the caches matches no
prompt, but has to be evicted.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from app.http.server import run
from app.options import BASE_URL, FACTOR, SEED, Command, Number, Option
from loadtest import report
from loadtest.client import ClusterClient, Outcome, RequestError, clock
from loadtest.command import json_option, option, read, save
from loadtest.door_client import Api, DoorClient
from loadtest.report import PolicyRun
from loadtest.traces import DEMO_TRACE, Session, Trace, TraceRequest

if TYPE_CHECKING:
    from loadtest.command import Console

DEADLINE_S = 600.0


CLIENTS = {Api.KVROUTE: ClusterClient, Api.OPENAI: DoorClient}

api_option = click.option(
    "--api",
    cls=Option,
    default=Api.KVROUTE,
    show_default=True,
    type=click.Choice(Api, case_sensitive=False),
    help="kvroute: ask for a worker, and send it the request; openai: send the request to the "
    "router, as OpenAI clients do.",
)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one replay has got; means are over all requests answered so far, warm-up included."""

    policy: str
    done: int
    total: int
    failed: int
    hit_rate: float
    ttft_mean_s: float
    """Engine seconds."""


async def replay_policy(
    trace: Trace,
    base_url: str | Sequence[str],
    policy: str | None,
    *,
    api: Api = Api.KVROUTE,
    speedup: float = 1.0,
    load: float = 1.0,
    warmup: float = 0.25,
    seed: int = 0,
    on_progress: Callable[[Progress], None] | None = None,
) -> PolicyRun:
    """Plays the whole trace under one policy.

    base_url: of the balancer; if there are several, of router replicas, they get the calls in turn.
    policy: None for the routers' own default; with OpenAI's API, whose requests name none, it only
    names the run.
    speedup: how much faster than real time the cluster's engines run, and the trace is played.
    load: arrival rate, as a multiple of the recorded one.
    warmup: share of the requests that the figures leave out.
    seed: for the prompts' tokens; with another one, a replay finds nothing of this one's in caches.
    on_progress: called after each request.
    Raises RequestError if the cluster does not answer at the start; later failures are outcomes.
    """
    async with CLIENTS[api](base_url, deadline_s=DEADLINE_S / speedup) as client:
        player = _Player(client, policy, speedup, seed, trace.num_requests, on_progress)
        workers = await client.workers()
        outcomes = await player.play(trace.at_load(load))
        return PolicyRun(
            policy=policy or "default",
            trace=trace.name,
            speedup=speedup,
            load=load,
            warmup=warmup,
            outcomes=tuple(outcomes),
            workers=tuple(workers),
            held_back=client.num_held_back,
            lost_calls=client.num_lost_calls,
        )


@contextmanager
def progress_display(console: Console, total: int) -> Iterator[Callable[[Progress], None]]:
    """A live line on the console; yields the `on_progress` that feeds it."""
    from rich import progress as rich_progress

    columns = (
        rich_progress.TextColumn("{task.description}"),
        rich_progress.BarColumn(bar_width=24),
        rich_progress.MofNCompleteColumn(),
        rich_progress.TimeElapsedColumn(),
        rich_progress.TextColumn("{task.fields[figures]}"),
    )
    with rich_progress.Progress(*columns, console=console, refresh_per_second=4) as bar:
        task = bar.add_task("connecting", total=total, figures="")

        def show(progress: Progress) -> None:
            failed = f", [red]{progress.failed:,} failed" if progress.failed else ""
            bar.update(
                task,
                description=progress.policy,
                completed=progress.done,
                figures=f"{progress.hit_rate:.0%} from cache, TTFT {progress.ttft_mean_s:.2f} s"
                + failed,
            )

        yield show


class _Player:
    def __init__(
        self,
        client: ClusterClient,
        policy: str | None,
        speedup: float,
        seed: int,
        total: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._client = client
        self._policy = policy
        self._speedup = speedup
        self._seed = seed
        self._total = total
        self._on_progress = on_progress
        # Routers remember ids, and a trace may be played twice.
        self._id_prefix = f"replay-{uuid.uuid4().hex[:8]}"
        self._outcomes: list[Outcome] = []
        self._failed = self._prompt_tokens = self._cached_tokens = 0
        self._ttft_sum_s = 0.0

    async def play(self, trace: Trace) -> list[Outcome]:
        """Outcomes in order of arrival, in engine seconds from the start."""
        start = clock()
        async with asyncio.TaskGroup() as group:
            for session in trace.sessions:
                arrival = start + session.start_s / self._speedup
                await _sleep_until(arrival)
                group.create_task(self._play_session(session, start, arrival))
        return sorted(self._outcomes, key=lambda outcome: outcome.arrival_s)

    async def _play_session(self, session: Session, start: float, arrival: float) -> None:
        for turn in session.turns:
            arrival += turn.think_s / self._speedup
            await _sleep_until(arrival)
            outcome = await self._send(turn, arrival)
            self._note(_in_engine_time(outcome, start, self._speedup))
            arrival = clock()

    async def _send(self, request: TraceRequest, arrival: float) -> Outcome:
        return await self._client.send(
            f"{self._id_prefix}-{request.index}",
            lambda: request.prompt(self._seed).astype("<u4", copy=False).tobytes(),
            output_tokens=request.output_tokens,
            policy=self._policy,
            arrival=arrival,
        )

    def _note(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        if outcome.first_token_s is None:
            self._failed += 1
        else:
            self._prompt_tokens += outcome.prompt_tokens
            self._cached_tokens += outcome.cached_tokens
            self._ttft_sum_s += outcome.first_token_s - outcome.arrival_s
        if self._on_progress is None:
            return
        answered = len(self._outcomes) - self._failed
        self._on_progress(
            Progress(
                policy=self._policy or "default",
                done=len(self._outcomes),
                total=self._total,
                failed=self._failed,
                hit_rate=self._cached_tokens / max(1, self._prompt_tokens),
                ttft_mean_s=self._ttft_sum_s / max(1, answered),
            )
        )


async def _sleep_until(when: float) -> None:
    await asyncio.sleep(when - clock())


def _in_engine_time(outcome: Outcome, start: float, speedup: float) -> Outcome:
    def scaled(moment: float | None) -> float | None:
        return None if moment is None else (moment - start) * speedup

    return replace(
        outcome,
        arrival_s=(outcome.arrival_s - start) * speedup,
        sent_s=(outcome.sent_s - start) * speedup,
        first_token_s=scaled(outcome.first_token_s),
        end_s=scaled(outcome.end_s),
    )


@click.command(cls=Command)
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEMO_TRACE,
    help="JSON lines in the Mooncake or the agentic-session format. Default: 13 minutes of real "
    "chat traffic (2,400 requests) that a checkout has.",
)
@option(
    "--url",
    "http://127.0.0.1:8080",
    "URL of the cluster: its load balancer, or a single router.",
    BASE_URL,
)
@api_option
@option(
    "--policy policies",
    None,
    "Routing policy to play the trace under, such as latency or round_robin. Give it several "
    "times to compare; the ratio is between the first and the last. Only the first finds caches "
    "empty; `kvroute demo` starts a fresh cluster for each. Default: the routers' own.",
    None,
    several=True,
)
@option(
    "--speedup",
    1.0,
    "Play the trace this many times faster than recorded, for simulated workers that run "
    "faster by the same factor. Reported seconds are scaled back.",
    FACTOR,
)
@option(
    "--load",
    1.0,
    "Arrival rate, as a multiple of the recorded one; answers take just as long.",
    FACTOR,
)
@option("--requests", None, "Play at most this many requests.")
@option(
    "--warmup",
    0.25,
    "Leave this share of the requests, the first ones, out of the figures, since caches "
    "start empty.",
    Number(0, 1, max_open=True),
)
@option(
    "--seed",
    0,
    "Seed of the prompts' tokens. The second policy is played with seed+1, and so on, so that "
    "it finds nothing from the one before in the workers' caches.",
    SEED,
)
@json_option
def replay(
    trace_file: Path,
    url: str,
    api: Api,
    policies: tuple[str, ...],
    speedup: float,
    load: float,
    requests: int | None,
    warmup: float,
    seed: int,
    json_file: Path | None,
) -> None:
    """Play recorded traffic against a running cluster and compare routing policies.

    Every request is routed, sent to its worker, streamed to its end and released, at the time
    given in the trace. The report says how much of the prompts workers found in their caches, how
    long callers waited for the first token, and how evenly workers were used.
    """
    if policies and api is Api.OPENAI:
        raise click.UsageError("with --api openai, the policy is that of the routers")
    trace = read(trace_file).cut(requests=requests)
    for policy in policies or (None,):
        run(_check_answers(url, policy, api))

    from loadtest.command import Console

    console = Console()
    runs = []
    for number, policy in enumerate(policies or (None,)):
        with progress_display(console, trace.num_requests) as on_progress:
            playing = replay_policy(
                trace,
                url,
                policy,
                api=api,
                speedup=speedup,
                load=load,
                warmup=warmup,
                seed=seed + number,
                on_progress=on_progress,
            )
            runs.append(run(playing))
    _tell(runs, console, json_file)
    if all(outcome.failure for played in runs for outcome in played.outcomes):
        raise click.ClickException("no request was answered")


def _tell(runs: list[PolicyRun], console: Console, json_file: Path | None) -> None:
    console.print(report.table(runs))
    for problem in _problems(runs):
        console.print(problem, style="red", markup=False)
    save(report.as_json(runs), json_file)


async def _check_answers(url: str, policy: str | None, api: Api) -> None:
    """Sends one token. Raises ClickException: better now than after the whole trace."""
    try:
        async with CLIENTS[api](url, deadline_s=5.0) as client:
            outcome = await client.send(
                f"probe-{uuid.uuid4().hex[:8]}", lambda: bytes(4), output_tokens=1, policy=policy
            )
    except RequestError as error:
        raise click.ClickException(str(error)) from error
    if outcome.failure is not None:
        raise click.ClickException(f"a test request failed: {outcome.error}")


def _problems(runs: list[PolicyRun]) -> Iterator[str]:
    for played in runs:
        failed = [outcome for outcome in played.outcomes if outcome.failure]
        for kind, count in Counter(outcome.failure for outcome in failed).items():
            example = next(outcome.error for outcome in failed if outcome.failure is kind)
            yield f"{played.policy}: {count:,} failed, {kind}, such as: {example}"
        if played.held_back:
            yield f"{played.policy}: {played.held_back:,} waited for a free slot of this client"
        if played.lost_calls:
            yield f"{played.policy}: {played.lost_calls:,} confirmations or releases were lost"
