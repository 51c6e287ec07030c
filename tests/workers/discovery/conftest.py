import pytest

from workers.bridge import follower
from workers.discovery import source


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    """Engines are looked at more often than they are as a rule."""
    monkeypatch.setattr(follower, "POLL_S", 0.02)
    monkeypatch.setattr(follower, "LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr(source, "LOOK_S", 0.02)
