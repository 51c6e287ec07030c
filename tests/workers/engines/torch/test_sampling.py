import math
from collections import Counter

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from workers.engines.base import Sampling
from workers.engines.torch.sampling import TokenSampler, sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def some_logits(num_seqs, vocab_size=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_seqs, vocab_size, generator=generator) * 3


def drawn(logits, num_draws=5000, **options):
    """How often each token is drawn from the same logits."""
    samplers = [TokenSampler(Sampling(seed=seed, **options)) for seed in range(num_draws)]
    return Counter(sample(logits.expand(num_draws, -1), samplers))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0, 5e-324, 9e-6, 1e-5])
def test_a_temperature_near_zero_takes_the_most_likely_token(temperature, device):
    logits = some_logits(5)
    samplers = [TokenSampler(Sampling(temperature=temperature)) for _ in range(5)]
    assert sample(logits.to(device), samplers) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": -1},
        {"top_k": 7},
        {"top_k": 99},
        {"top_p": 0.8},
        {"top_p": 1e-9},
        {"top_p": 0.8, "top_k": 7},
        {"top_p": 0.6, "top_k": 30, "temperature": 1.5},
    ],
    ids=str,
)
def test_tokens_are_drawn_with_their_probabilities_and_excluded_ones_never(options, device):
    logits = some_logits(1)
    scores = logits / options.get("temperature", 1.0)
    if options.get("top_k", 0) > 0:
        scores = TopKLogitsWarper(options["top_k"])(None, scores)
    if "top_p" in options:
        scores = TopPLogitsWarper(options["top_p"])(None, scores)
    likely = scores.softmax(-1)[0].tolist()
    counts = drawn(logits.to(device), **options)
    for token, probability in enumerate(likely):
        if probability == 0:
            assert counts[token] == 0
        spread = math.sqrt(probability * (1 - probability) / 5000)
        assert counts[token] / 5000 == pytest.approx(probability, abs=5 * spread)


def test_top_k_keeps_tokens_tied_with_the_last_one():
    assert set(drawn(torch.zeros(1, 4), top_k=2)) == {0, 1, 2, 3}


def test_top_p_is_a_share_of_what_top_k_leaves():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert set(drawn(logits, top_p=0.6)) == {0, 1}
    assert set(drawn(logits, top_p=0.6, top_k=2)) == {0}  # 0.5 of 0.8 is more than 0.6


def test_an_impossible_token_is_never_drawn():
    logits = torch.full((1, 6), -torch.inf)
    logits[0, [2, 4]] = 0.0
    for options in ({}, {"top_p": 0.99}, {"top_k": 5}):
        assert set(drawn(logits, **options)) == {2, 4}


class FixedDraw(TokenSampler):
    """Always draws this number."""

    def __init__(self, number):
        super().__init__(Sampling())
        self.number = number

    def draw(self):
        return self.number


def test_the_lowest_and_the_highest_draw_still_give_possible_tokens():
    draws = [FixedDraw(0.0), FixedDraw(math.nextafter(1.0, 0.0))]
    for seed in range(200):
        logits = some_logits(2, seed=seed)
        logits[:, [0, 1, 2, -3, -2, -1]] = -torch.inf
        lowest, highest = sample(logits, draws)
        assert lowest == 3
        assert highest < 47


def test_a_requests_tokens_do_not_depend_on_the_others_in_its_batch():
    options = [
        Sampling(seed=1),
        Sampling(temperature=0),
        Sampling(seed=2, top_p=0.9),
        Sampling(seed=3, top_k=5, temperature=0.7),
        Sampling(seed=1),
    ]
    together = [TokenSampler(o) for o in options]
    alone = [TokenSampler(o) for o in options]
    tokens = []
    for step in range(50):
        logits = some_logits(len(options), seed=step)
        tokens.append(sample(logits, together))
        assert tokens[-1] == [
            sample(logits[n : n + 1], [sampler])[0] for n, sampler in enumerate(alone)
        ]
    assert [row[0] for row in tokens] != [row[4] for row in tokens]


def test_the_same_seed_gives_the_same_tokens_and_no_seed_gives_different_ones():
    def tokens(seed):
        sampler = TokenSampler(Sampling(seed=seed))
        return [sample(torch.zeros(1, 1000), [sampler])[0] for _ in range(20)]

    assert tokens(7) == tokens(7)
    assert tokens(7) != tokens(8)
    assert tokens(None) != tokens(None)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 0}])
def test_nan_logits_still_give_a_token(options):
    [token] = sample(torch.full((1, 10), torch.nan), [TokenSampler(Sampling(**options))])
    assert 0 <= token < 10
