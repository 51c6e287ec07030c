import pytest

from tests.workers.bridge.holder import Holder


@pytest.fixture
def holder():
    return Holder()
