from app.core.types import SequenceHash
from app.ops.reuse import PrefixUsage, usages
from tests.state.test_decisions import CHAIN, record


def test_a_prompt_of_less_than_a_block_has_no_prefixes():
    found = list(usages([record("r1", []), record("r2", CHAIN[:4])]))
    assert [(usage.num_blocks, usage.requests) for usage in found] == [(4, 1)]


def test_a_prefix_counts_once_for_each_request_that_has_all_of_it():
    system, document = CHAIN[:20], CHAIN[:40]

    def private(n, stem, length):
        return [*stem, *(SequenceHash(1000 * n + i) for i in range(length))]

    prompts = [private(1, system, 30), private(2, document, 8), private(3, document, 60), CHAIN[:4]]
    found = list(usages(record(f"r{n}", prompt) for n, prompt in enumerate(prompts)))
    # 40 and 20 are among the recorded positions, and so is 4.
    assert found[:3] == [
        PrefixUsage(CHAIN[3], 4, 4),
        PrefixUsage(CHAIN[19], 20, 3),
        PrefixUsage(CHAIN[39], 40, 2),
    ]
    assert [(usage.num_blocks, usage.requests) for usage in found[3:]] == [
        (96, 1),
        (48, 1),
        (48, 1),
    ]
