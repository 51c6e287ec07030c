import pytest

from tests.workers.agent.harness import Observer


@pytest.fixture
def observer(redis):
    return Observer(redis)


@pytest.fixture(autouse=True)
def frequent_renewals(monkeypatch):
    """Of leases that are long: short ones lapse on a busy machine."""
    monkeypatch.setattr("workers.agent.agent.MAX_RENEWAL_S", 0.1)
