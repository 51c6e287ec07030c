"""The frame of every experiment: rows, each played with several seeds, and a table of figures.

main = experiment(rows, columns, option("--workers", 8))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from app.simulation.profiles import Profile
from loadtest.client import Outcome
from loadtest.command import Decorator, command_of, jobs_option, json_option, option, save
from loadtest.processes import forked
from loadtest.report import PolicyRun, summarise

Figures = Mapping[str, Any]
Play = Callable[[int], Figures]
"""The figures of a row with a seed."""
Rows = Mapping[str, Mapping[str, Play]]
"""Plays by the title of a table and by name; a name may have several cells, as SEPARATOR parts
them."""
Columns = Sequence[tuple[str, str, str]]
"""Head of each column, its figure, and how that is written, as for str.format."""
SEPARATOR = " | "
MOST_REFUSED = 0.001
"""Largest share refused: beyond it figures say nothing, as the refused would have waited
longest."""
SLO_TTFT_S = 2.0
SLO_PREFILLS = 1.5
SLO_TOKEN_S = 0.1
"""The first token within SLO_TTFT_S and SLO_PREFILLS times the prompt's own prefill; SLO_TOKEN_S
for each further one."""
_rows: Rows


def experiment(
    rows: Callable[..., Rows],
    columns: Columns,
    *options: Decorator,
    labels: str = "",
    seeds: int = 1,
    middle: Callable[..., Any] = np.mean,
    one_by_one: bool = False,
) -> click.Command:
    """Plays the rows that `rows` makes of the options, and prints them in Markdown.

    Each figure is the `middle` of the seeds; columns that no row has a figure for are left out.
    labels: heads of the columns that a row's name fills. one_by_one: no two plays are at once. The
    help is the docstring of the module of `rows`.
    """

    def command(seeds: int, json_file: Path | None, jobs: int = 1, **chosen: Any) -> None:
        global _rows
        _rows, played = rows(**chosen), {}
        with forked(jobs) as executor:
            running = {
                (title, name): executor.map(partial(_play, title, name), range(seeds))
                for title, plays in _rows.items()
                for name in plays
            }
            for title, plays in _rows.items():
                played[title] = {name: list(running[title, name]) for name in plays}
                if title:
                    click.echo(f"\n{title}\n")
                for line in _table(played[title], columns, labels, middle):
                    click.echo(line)
        save(played, json_file)

    shared = (option("--seeds", seeds, "Runs of each row."), json_option)
    jobs = () if one_by_one else (jobs_option,)
    return command_of(command, rows.__module__, (*options, *jobs, *shared))


def _play(title: str, name: str, seed: int) -> Figures:
    return _rows[title][name](seed)


def _table(
    played: Mapping[str, Sequence[Figures]],
    columns: Columns,
    labels: str,
    middle: Callable[..., Any],
) -> Iterable[str]:
    shown = [
        (head, key, form)
        for head, key, form in columns
        if any(figures.get(key) is not None for seeds in played.values() for figures in seeds)
    ]
    yield f"| {SEPARATOR.join((labels, *(head for head, _, _ in shown)))} |"
    yield "|---" * (labels.count("|") + 1 + len(shown)) + "|"
    for name, seeds in played.items():
        cells = [name]
        is_refused = np.mean([one.get("refused") or 0.0 for one in seeds]) > MOST_REFUSED
        for _, key, form in shown:
            values = [one[key] for one in seeds if one.get(key) is not None]
            if is_refused and key != "refused":
                values = []
            cell = form.format(float(middle(values))) if values else "-"
            cells.append(cell.replace("%", " %"))
        yield f"| {SEPARATOR.join(cells)} |"


def measured(
    outcomes: Iterable[Outcome], profile: Profile, workers: Sequence[str] = ()
) -> dict[str, Any]:
    """Figures of requests. A figure over no request at all is None.

    Those of PolicySummary, and `ttft_longest_s`; `within_slo`: share of the requests with their
    first token within 2 s plus 1.5 times the prefill that the prompt would take alone and uncached,
    and at most 100 ms per further token; `refused`: share that no worker took;
    `goodput_per_s`: requests within SLO per engine second; `token_s`, `token_p99_s`: time per token
    after the first, of requests that got more than that.
    workers: names of those that are counted even without a request.
    """
    run = PolicyRun("", "", 1.0, 1.0, 0.0, tuple(outcomes), tuple(workers))
    good = sum(meets_slo(outcome, profile) for outcome in run.outcomes)
    per_token_s = [token_s(outcome) for outcome in run.outcomes if outcome.output_tokens > 1]
    span_s = run.outcomes[-1].arrival_s - run.outcomes[0].arrival_s
    firsts_s = [o.first_token_s - o.arrival_s for o in run.outcomes if o.first_token_s is not None]
    return asdict(summarise(run)) | {
        "ttft_longest_s": max(firsts_s, default=None),
        "within_slo": good / len(run.outcomes),
        "refused": sum(outcome.failure is not None for outcome in run.outcomes) / len(run.outcomes),
        "goodput_per_s": good / span_s if span_s else None,
        "token_s": float(np.mean(per_token_s)) if per_token_s else None,
        "token_p99_s": float(np.percentile(per_token_s, 99)) if per_token_s else None,
    }


@cache
def alone_s(profile: Profile, prompt_tokens: int) -> float:
    """Seconds to prefill a prompt with nothing cached, on a worker with nothing else to do."""
    starts = range(0, prompt_tokens, profile.max_batch_tokens)
    chunks = [(start, min(profile.max_batch_tokens, prompt_tokens - start)) for start in starts]
    return sum(profile.compute_s(n, n * (start + n / 2), 0) for start, n in chunks)


def meets_slo(outcome: Outcome, profile: Profile) -> bool:
    if outcome.first_token_s is None or outcome.end_s is None:
        return False
    ttft_s = outcome.first_token_s - outcome.arrival_s
    allowed_s = SLO_TTFT_S + SLO_PREFILLS * alone_s(profile, outcome.prompt_tokens)
    return ttft_s <= allowed_s and token_s(outcome) <= SLO_TOKEN_S


def token_s(outcome: Outcome) -> float:
    """Mean seconds for each token after the first. outcome: of a request that was answered."""
    assert outcome.first_token_s is not None
    assert outcome.end_s is not None
    return (outcome.end_s - outcome.first_token_s) / max(1, outcome.output_tokens - 1)
