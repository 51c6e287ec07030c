"""What follows when a worker did not answer a request, or not to the end: a table. Pure.

Until the first byte has gone out to the client, another worker takes the place of one that failed;
later, one goes on with a stream that can migrate. Whose fault a failure is, `blame` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from app.core.failures import Failure, Suspects

TRIES = 4
"""Workers that a request may be refused by. As no more than half of a fleet is suspended, and a few
of the others may have begun to fail just now."""
MAX_BROKEN = 2
"""Workers that may break off while they have a request. It may be what they break of, so that no
more are given it."""
MAX_UNREACHED = 16
"""Workers that never got the request, as there was no connection to them."""


class Try(Enum):
    """How a try ended that gave nothing to pass on."""

    NOBODY = auto()
    """No worker takes the request."""
    REFUSED = auto()
    """The worker answered, but another one may do better."""
    BROKEN = auto()
    """It broke off, or was not reached."""
    NO_KV = auto()
    """Its source failed, or what that handed on may be wrong."""


class NextStep(Enum):
    """What follows."""

    RETRY = auto()
    """Another worker is asked."""
    ASK_AGAIN = auto()
    """The one that refused it is asked once more."""
    REFUSE = auto()
    """The client gets what the last worker that answered said."""
    MIGRATE = auto()
    """Another worker goes on with the answer."""
    FINISH = auto()
    """All of the answer was there, but for its ending."""
    GIVE_UP = auto()
    """The client is told of the failure."""


@dataclass(slots=True)
class TryCounts:
    """What workers made of a request so far. refused: those that answered that they do not take it,
    for whatever reason. broken: those that broke off while they had it. unreached: those that never
    had it."""

    refused: int = 0
    broken: int = 0
    unreached: int = 0
    asked_again: bool = False
    """Whether one that had refused it was asked once more."""

    def broke(self, *, never_sent: bool) -> None:
        self.unreached += never_sent
        self.broken += not never_sent

    @property
    def nobody_had_it(self) -> bool:
        return not (self.refused or self.broken)

    @property
    def has_broken_all(self) -> bool:
        """Whether it may be the request that workers break of."""
        return self.broken >= MAX_BROKEN

    @property
    def is_over(self) -> bool:
        """Whether no further worker is to be asked."""
        return (
            self.has_broken_all
            or self.refused + self.broken >= TRIES
            or self.unreached >= MAX_UNREACHED
        )

    def may_ask_again(self, refusal: Failure | None) -> bool:
        """Whether the only worker that has answered may do better if it has it again: whoever broke
        off is not asked."""
        may_pass = refusal is not None and refusal.whose is Suspects.EITHER
        return may_pass and self.refused == 1 and not self.asked_again


def after_try(
    ended: Try,
    tally: TryCounts,
    refusal: Failure | None = None,
    *,
    says_why: bool = False,
    is_late: bool = False,
) -> NextStep:
    """Before anything has gone out to the client.

    refusal: of the last worker that answered, and says_why: whether its answer is one to pass on.
    is_late: the client has waited for as long as it may.
    """
    if ended is Try.NOBODY and tally.may_ask_again(refusal):
        return NextStep.ASK_AGAIN
    if ended is not Try.NOBODY and not is_late and not tally.is_over:
        return NextStep.RETRY
    return NextStep.REFUSE if says_why else NextStep.GIVE_UP


def after_cut(tally: TryCounts, *, is_finished: bool, can_go_on: bool) -> NextStep:
    """In the midst of an answer. is_finished: its last token has come. can_go_on: another worker
    can say the rest."""
    if is_finished:
        return NextStep.FINISH
    return NextStep.MIGRATE if can_go_on and not tally.is_over else NextStep.GIVE_UP
