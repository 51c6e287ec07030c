import numpy as np
from numpy.testing import assert_allclose

from app.policy.cost import COMPUTING, RequestSize, awaiting, latency
from tests.policy.test_cost import ROUND_SPEED, candidates

SIZE = RequestSize(isl_tokens=1000, block_size=100)


def test_the_wait_for_what_is_computed_costs_at_most_what_it_saves():
    # Three compute nine of ten blocks for others, and the third of them fetches these; the fourth
    # is busy with something else.
    queues = [0.4, 90.0, 0.4, 0.4]
    busy = candidates(4, ROUND_SPEED, prefill_s=queues, receiving_s=[0.0, 0.0, 0.1, 0.0])
    busy.overlap_device[:] = 9.0
    published = np.zeros(4)
    plain, costs = latency(busy, SIZE), awaiting(latency, [0, 1, 2], published)(busy, SIZE)
    # 1,000 tokens take 1 s and 0.5 s for pairs, and the last hundred of them 0.1 and 0.095.
    assert_allclose(costs.terms[COMPUTING], [0.4, 2 * (1.5 - 0.195), 0.0, 0.0])
    assert_allclose(costs.cost, plain.cost + costs.terms[COMPUTING])
