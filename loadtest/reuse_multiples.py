"""What it costs to reuse prompts only in multiples of so many tokens.

    python -m loadtest.reuse_multiples --trace tests/data/agentic-slice.jsonl

An engine that computes prompts in chunks reuses whole chunks. For each multiple, this is the share
of all prompt tokens that would be reused if nothing was ever evicted and all prompts went to one
worker. Equal ids of a trace are equal tokens; what lies behind a request's ids is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from loadtest.command import Command, json_option, option, read, save, table, trace_option
from loadtest.console import Console
from loadtest.traces import Trace

MULTIPLES = 16, 256, 512, 1024, 2048


def shared_tokens(trace: Trace) -> list[tuple[int, int]]:
    """Of each request, by session: its prompt's tokens, and how many leading ones came before."""
    seen: set[int] = set()
    requests = []
    for session in trace.sessions:
        for turn in session.turns:
            prefix, shared, is_shared = 0, 0, True
            for block in turn.blocks:
                prefix = hash((prefix, block))
                is_shared = is_shared and prefix in seen
                shared += turn.block_tokens * is_shared
                seen.add(prefix)
            requests.append((turn.input_tokens, min(shared, turn.input_tokens)))
    return requests


def reused_share(requests: Sequence[tuple[int, int]], multiple: int) -> float:
    """Of all tokens; the last token of a prompt is computed in any case."""
    reused = sum(min(shared, tokens - 1) // multiple * multiple for tokens, shared in requests)
    return reused / sum(tokens for tokens, _ in requests)


@click.command(cls=Command)
@trace_option
@option("--multiple multiples", MULTIPLES, "Tokens.", several=True)
@json_option
def main(trace_file: Path, multiples: tuple[int, ...], json_file: Path | None) -> None:
    """Show the share of prompt tokens that is reused in multiples of so many."""
    trace = read(trace_file)
    requests = shared_tokens(trace)
    shares = {multiple: reused_share(requests, multiple) for multiple in multiples}
    cells = table("in multiples of", "reused", title=f"{trace.name}: {len(requests):,} requests")
    for multiple, share in shares.items():
        cells.add_row(f"{multiple:,}", f"{share:.1%}")
    Console().print(cells)
    save({"trace": trace.name, "requests": len(requests), "shares": shares}, json_file)


if __name__ == "__main__":
    main()
