from __future__ import annotations

import pytest

from tests.chart.installed import INSTALLED, Installed
from tests.chart.rendering import EXAMPLES


@pytest.fixture(params=EXAMPLES)
def installed(request: pytest.FixtureRequest) -> Installed:
    return INSTALLED[request.param]
