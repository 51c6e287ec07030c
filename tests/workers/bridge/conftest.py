from __future__ import annotations

import pytest

from tests.workers.bridge.holder import Holder


@pytest.fixture
def holder() -> Holder:
    return Holder()
