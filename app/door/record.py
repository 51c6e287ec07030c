"""What is known of one request, from its admission to its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.door.models import Model
from app.policy.decision import Decision, RouteRequest
from app.router.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens, as the engine counted them. cached: None: it did not say."""

    prompt: int
    output: int
    cached: int | None


@dataclass(slots=True)
class Admitted:
    """A request that has been let in.

    request: who asks, and the length of the prompt, estimated without one. prompt: None if its
    tokens cannot be known here; it is then routed by load and session alone. tokens_from: who knew
    the tokens, or why nobody did, for headers and metrics.
    """

    request: RouteRequest
    model: Model
    prompt: Prompt | None
    tokens_from: str
    key_name: str = ""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return self.request.isl_tokens


@dataclass(slots=True)
class RequestRecord:
    """What is known of a request at its end. Times: monotonic seconds; 0.0: it never came to that.

    outcome: ok, or what it ended by. ended_by: client, worker or router.
    """

    admitted: Admitted
    began_s: float
    tries: int = 0
    decision: Decision | None = None
    first_token_s: float = 0.0
    ended_s: float = 0.0
    usage: Usage | None = None
    outcome: str = ""
    ended_by: str = ""
    status: int = 0
    failed: list[str] = field(default_factory=list)
    """The workers that failed it."""
    migrations: int = 0
    """How often another worker went on with its answer."""

    @property
    def predicted_cached(self) -> int | None:
        """Tokens of the prompt that the worker was predicted to have cached; None: nobody could
        tell. The last token is always computed, and with it its block."""
        decision, admitted = self.decision, self.admitted
        if decision is None or admitted.prompt is None or decision.degraded or self.migrations:
            return None
        info = decision.worker
        unit = info.reuse_blocks
        blocks = min(decision.overlap.total, (admitted.num_tokens - 1) // info.block_size)
        return max(0, blocks // unit * unit - info.recomputed_blocks) * info.block_size
