"""The bound that placement can hope for: each request alone, on one worker with the memory of all.

Nothing queues, nothing shares a batch, and no block lies on the wrong worker. It is a yardstick, no
proof: another order of eviction might keep more of what will be asked for.
"""

from __future__ import annotations

import heapq
from itertools import count, cycle, islice
from operator import itemgetter

from app.simulation.engine import SimEngine
from app.simulation.setting import Setting
from app.simulation.steps import Finished, SimRequest
from loadtest.client import Outcome
from loadtest.traces import Trace
from loadtest.virtual import TracePrompts


def ideal(setting: Setting, trace: Trace, prompts: TracePrompts) -> list[Outcome]:
    """Outcomes in order of arrival, if one worker had the memory of all and never two requests.

    It is as fast as the fastest of the profiles, and has on its device all blocks that the device
    and host tiers of the workers can hold together, the least recently used evicted first.
    """
    size = setting.block_size
    profiles = list(islice(cycle(setting.profiles), setting.num_workers))
    memory = sum(profile.kv_pool_tokens + setting.host_pool_tokens for profile in profiles)
    engines = [
        SimEngine(profile, block_size=size, now=lambda: 0.0, kv_pool_tokens=memory)
        for profile in dict.fromkeys(profiles)
    ]
    order = count()
    due = [(s.start_s + s.turns[0].think_s, next(order), s, 0) for s in trace.sessions]
    heapq.heapify(due)
    outcomes = []
    while due:
        arrival_s, _, session, turn = heapq.heappop(due)
        request = prompts.of(session.turns[turn])
        first_s, end_s, finished = min(
            (_alone(engine, request) for engine in engines), key=itemgetter(0)
        )
        outcomes.append(
            Outcome(
                request_id=request.request_id,
                arrival_s=arrival_s,
                sent_s=arrival_s,
                prompt_tokens=request.prompt_tokens,
                attempts=1,
                first_token_s=arrival_s + first_s,
                end_s=arrival_s + end_s,
                cached_tokens=finished.cached_tokens,
                output_tokens=finished.output_tokens,
            )
        )
        turn += 1
        if turn < len(session.turns):
            then_s = arrival_s + end_s + session.turns[turn].think_s
            heapq.heappush(due, (then_s, next(order), session, turn))
    return outcomes


def _alone(engine: SimEngine, request: SimRequest) -> tuple[float, float, Finished]:
    """Seconds to the first token and to the end of a request that the engine runs alone."""
    engine.submit(request)
    first_s = passed_s = 0.0
    while True:
        quiet = engine.quiet_steps()
        if quiet > 1:
            passed_s += engine.decode_s(quiet)
            engine.skip(quiet)
            continue
        step = engine.step()
        assert step is not None
        engine.take_events()
        passed_s += step.duration_s
        if step.first_tokens:
            first_s = passed_s
        if step.finished:
            return first_s, passed_s, step.finished[0]
