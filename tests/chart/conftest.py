import pytest

from tests.chart.installed import INSTALLED
from tests.chart.rendering import EXAMPLES


@pytest.fixture(params=EXAMPLES)
def installed(request):
    return INSTALLED[request.param]
