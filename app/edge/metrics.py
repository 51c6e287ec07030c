"""What a scrape tells of the files by which a replica goes, and of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry

from app.edge.keys import Keys
from app.edge.watched_files import WatchedFiles
from app.http.metrics import Family, Sampled, ScrapeCollector

FILES_REFUSED = Family(
    "kvroute_files_refused",
    "gauge",
    "1 while what the files with keys, settings or certificates say does not count, since it was "
    "refused, else 0.",
    ("what",),
)
NO_KEY_LEFT = Family(
    "kvroute_no_key_left",
    "gauge",
    "1 if nobody is let in, since a key is asked for and the file has none any more, else 0.",
)


def show_files(registry: CollectorRegistry, watched: Sequence[WatchedFiles], keys: Keys) -> None:
    """watched: looked through at each scrape."""

    def samples() -> Iterator[Sampled]:
        for files in watched:
            yield FILES_REFUSED, (files.what,), float(bool(files.problem))
        yield NO_KEY_LEFT, (), float(keys.is_locked)

    registry.register(ScrapeCollector([FILES_REFUSED, NO_KEY_LEFT], samples))
