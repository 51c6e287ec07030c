from app.core.types import Tier
from app.simulation.steps import EngineStep
from workers.engines.torch import admission
from workers.engines.torch.admission import AdaptiveAdmission
from workers.kv.moves import AdmissionPolicy

BLOCK_SIZE = 16
COMPUTED_S = 0.002
"""A block."""


def learned():
    """Of a worker that computes a block in COMPUTED_S, and has always loaded faster from disk."""
    adaptive = AdaptiveAdmission(256, BLOCK_SIZE)
    for _ in range(20):
        step = EngineStep(
            duration_s=COMPUTED_S * 16,
            load_s=0.0,
            loaded_tokens=0,
            prefill_tokens=256,
            attention_pairs=0.0,
            decode_seqs=0,
            decode_context_tokens=0,
            emitted=[],
            first_tokens=[],
            finished=[],
        )
        adaptive.observe(step, ())
    for _ in range(500):
        adaptive.observe_load(Tier.DISK, 100, 100 * COMPUTED_S / 4)
    return adaptive


def test_a_disk_that_has_become_slow_is_left_after_a_few_loads():
    adaptive = learned()
    assert adaptive.revised(AdmissionPolicy()).loads(Tier.DISK)
    for _ in range(3):
        adaptive.observe_load(Tier.DISK, 100, 100 * COMPUTED_S * 2)
    policy = adaptive.revised(AdmissionPolicy())
    assert not policy.loads(Tier.DISK)
    assert not policy.stores(1, Tier.DISK), "nothing is written that will not be read"
    assert policy.loads(Tier.HOST)


def test_one_slow_load_does_not_end_the_use_of_a_disk():
    adaptive = learned()
    adaptive.observe_load(Tier.DISK, 100, 100 * COMPUTED_S * 2)
    assert adaptive.revised(AdmissionPolicy()).loads(Tier.DISK)


def test_a_disk_that_was_left_is_tried_again_later():
    adaptive = learned()
    for _ in range(9):
        adaptive.observe_load(Tier.DISK, 100, 100 * COMPUTED_S * 2)
    assert not adaptive.revised(AdmissionPolicy()).loads(Tier.DISK)
    adaptive._loaded_at[Tier.DISK] -= admission.TIER_RETRIED_S
    assert adaptive.revised(AdmissionPolicy()).loads(Tier.DISK)
