"""Trials of a fleet of six: a fault, whom it befalls, and what may come of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.fakes.faults import HANG_S, Faults

NUM_ENGINES = 6
ALL = tuple(range(NUM_ENGINES))
REFUSES = 0.5
"""Largest part of its fair share that an engine that answers nobody may be sent: it is tried now
and then, as nobody says that it is well again."""
ANSWER_TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class Row:
    """sick: the places of engines that `faults` befall. most_share: of what would be fair, the most
    that each of them may get once it is known; None: any. least_share: the least that it may get.
    stops_router: a replica gets SIGTERM as the fault begins, and another starts as it ends.
    on_s: how long the fault lasts.
    """

    name: str
    faults: Faults = field(default_factory=Faults)
    sick: tuple[int, ...] = (0,)
    most_share: float | None = REFUSES
    least_share: float = 0.0
    stops_router: bool = False
    on_s: float = 10.0


def works(name, faults, sick=(0,)):
    """A fault of an engine that computes as well as the others."""
    return Row(name, faults, sick, most_share=None, least_share=0.5)


ROWS = {
    row.name: row
    for row in (
        works("all: /health is 1 s late", Faults(health_s=1.0), ALL),
        works("all: /health is 3 s late", Faults(health_s=3.0), ALL),
        Row("one: /health never answers", Faults(health_s=HANG_S), most_share=None),
        Row("one: /health answers 403", Faults(health_status=403), most_share=None),
        Row("one: /health answers 403 once", Faults(health_status=403), most_share=None, on_s=1.0),
        Row("one: /v1/models is empty once", Faults(lists_models=False), most_share=None, on_s=1.0),
        works("one: /metrics answers 500", Faults(metrics_status=500)),
        Row("one: /v1/models is empty", Faults(lists_models=False), most_share=None, on_s=14.0),
        Row("one: 401", Faults(status=401)),
        Row("one: 404", Faults(status=404)),
        Row("one: 429, for 5 s", Faults(status=429, headers={"retry-after": "5"})),
        Row("two: 500", Faults(status=500), (0, 3)),
        Row("three: 503", Faults(status=503), (0, 2, 4)),
        Row("one: an error as first event", Faults(how="error first")),
        Row("one: an error before tokens", Faults(how="error before tokens")),
        Row("one: an error within", Faults(how="error within")),
        Row("one: an empty 200", Faults(how="empty")),
        Row("one: no end", Faults(how="unfinished")),
        Row("one: reset first", Faults(how="reset first")),
        Row("one: reset within", Faults(how="reset within")),
        Row("one: hangs behind its headers", Faults(how="hang")),
        Row("one: never answers", Faults(how="silent")),
        Row("two: nothing moves", Faults(how="stall"), (0, 3)),
        Row("one: is gone for 10 s", Faults(away_s=10.0)),
        Row(
            "one: 200 run and 200 wait there",
            Faults(more_running=200, more_waiting=200, kv_usage=1),
        ),
        # Who happens to have more of them is dearer meanwhile.
        Row(
            "all: whole answers take 6 s",
            Faults(whole_s=6.0),
            ALL,
            most_share=None,
            least_share=0.3,
            on_s=14.0,
        ),
        works("three: /tokenize never answers", Faults(tokenize_s=HANG_S), (0, 1, 2)),
        Row("two: contexts of 300 tokens", Faults(max_model_len=300), (0, 3), None, on_s=14.0),
        Row("a replica is stopped", sick=(), most_share=None, stops_router=True),
    )
}
