"""The names by which tests know the stand-in for engines that are not written anew yet."""

from tests.fakes.engine import FakeEngine as SickEngine
from tests.fakes.engine import fake_engine as sick_engine
from tests.fakes.faults import FOREIGN, HANG_S, WELL, Faults, How

__all__ = ("FOREIGN", "HANG_S", "WELL", "Faults", "How", "SickEngine", "sick_engine")
