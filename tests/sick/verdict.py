"""Verdicts on a fault: what came of it, and what should not have. No I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tests.sick.load import Ended
from tests.sick.rows import Row

EVEN_WITHIN_S = 10.0
WINDOW_S = 3.0
EVEN_SHARE = 0.5
"""Least part of its fair share that an engine as good as the others gets: with a dozen
requests, chance alone takes it as far down as this about one time in fifty."""
KNOWN_AFTER_S = 3.0
LEAST_S = 5.0
MOST_DELAY_S = 2.0
"""A median that grows by less is none of the fault's."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A fault that came at `on_s` and went at `off_s`, and was watched until `end_s`, all
    monotonic. ended: requests that began in that time or shortly before. came: when each engine got
    requests. inside: requests that engines broke, or held until they were given up."""

    row: Row
    num_replicas: int
    on_s: float
    off_s: float
    end_s: float
    ended: Sequence[Ended]
    came: Sequence[Sequence[float]]
    inside: int

    @property
    def failures(self):
        """How often each, of the requests that the fault may have befallen."""
        return Counter(one.failure for one in self.ended if one.failure)

    @property
    def num_failed(self):
        return sum(self.failures.values())

    def num_came(self, place, since_s, until_s):
        return sum(since_s <= at_s < until_s for at_s in self.came[place])

    def share(self, place, since_s, until_s, among):
        """Returns the engine's requests over what would be fair among those and itself."""
        places = {*among, place}
        every = sum(self.num_came(one, since_s, until_s) for one in places)
        return self.num_came(place, since_s, until_s) * len(places) / max(1, every)

    def even_after_s(self):
        """Returns how long after the fault all sick engines began to get their shares; None: not
        while it was watched."""
        begin = self.off_s
        while begin + WINDOW_S <= self.end_s:
            shares = [
                self.share(place, begin, begin + WINDOW_S, range(len(self.came)))
                for place in self.row.sick
            ]
            if all(share >= EVEN_SHARE for share in shares):
                return begin - self.off_s
            begin += 0.5
        return None

    def took_s(self):
        """How long an answer took, in the median of those that began meanwhile and went well."""
        took = [
            one.took_s
            for one in self.ended
            if not one.failure and self.on_s <= one.began_s < self.off_s
        ]
        return median(took) if took else 0.0


def complaints(trial, took_before_s):
    return [*_of_failures(trial), *_of_shares(trial), *_of_delays(trial, took_before_s)]


def _of_failures(trial):
    if trial.num_failed <= trial.inside:
        return []
    told = ", ".join(f"{count} x {failure}" for failure, count in sorted(trial.failures.items()))
    return [f"{trial.num_failed} failed, of which {trial.inside} were inside: {told}"]


def _of_shares(trial):
    row, known_s = trial.row, trial.on_s + KNOWN_AFTER_S
    well = [place for place in range(len(trial.came)) if place not in row.sick]
    said = []
    for place in well:
        share = trial.share(place, trial.on_s, max(trial.off_s, trial.on_s + LEAST_S), well)
        if share < EVEN_SHARE:
            said.append(f"engine {place} idled: {share:.2f} of its share")
    for place in row.sick if trial.off_s - known_s >= LEAST_S else ():
        share = trial.share(place, known_s, trial.off_s, well or row.sick)
        if row.most_share is not None and share > row.most_share:
            said.append(f"sick engine {place} got {share:.2f} of a fair share")
        if share < row.least_share:
            said.append(f"engine {place} works, and got {share:.2f} of its share")
    even_s = trial.even_after_s()
    if even_s is None or even_s > EVEN_WITHIN_S:
        after = "never" if even_s is None else f"after {even_s:.1f} s"
        said.append(f"even again {after}")
    return said


def _of_delays(trial, took_before_s):
    took_s = trial.took_s()
    if took_s <= took_before_s + MOST_DELAY_S:
        return []
    return [f"answers took {took_s:.1f} s, before {took_before_s:.1f} s"]
