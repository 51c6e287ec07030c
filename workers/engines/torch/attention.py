"""Attention over paged KV: for a chunk of one sequence, and for a token of each of several.

KV may be split among tensor-parallel ranks by heads. Attention is computed over all heads at once
all the same: with fewer of them, the kernels of CPUs and GPUs give other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Ranks = Sequence[Tensor]
"""Keys, or values, of a layer, by rank: (num_blocks, block_size, num_heads, head_size) each, of the
whole pool."""
Attend = Callable[[Tensor, Ranks, Ranks], Tensor]
"""(queries, keys, values) of a layer -> (num_tokens, num_heads * head_size).

queries: (num_tokens, num_heads, head_size). Keys and values include the tokens' own.
"""


class _Group(NamedTuple):
    """Sequences of similar length, which attend together, padded to the longest.

    rows: their rows in the batch.
    block_ids: their blocks, (num_seqs * num_blocks,).
    mask: (num_seqs, 1, 1, num_blocks * block_size), added to the scores.
    """

    rows: slice
    block_ids: Tensor
    mask: Tensor


def chunk_attention(own_blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Attend:
    """For the tokens from `start` to `end` of the sequence that has these blocks."""
    mask = None
    if start and end - start > 1:  # a single token attends to all before it
        positions = torch.arange(end, device=own_blocks.device)
        mask = _masked(positions > positions[start:, None], dtype)

    def attend(queries: Tensor, keys: Ranks, values: Ranks) -> Tensor:
        # The heads that share a KV head form a batch over it, so that no KV is repeated.
        k, v = (
            _gathered(ranks, own_blocks).flatten(0, 1)[:end].transpose(0, 1)[:, None]
            for ranks in (keys, values)
        )
        q = queries.transpose(0, 1).view(len(k), -1, len(queries), queries.shape[2])
        shape = *q.shape[:2], *k.shape[2:]
        out = F.scaled_dot_product_attention(
            q, k.expand(shape), v.expand(shape), attn_mask=mask, is_causal=not start
        )
        return out.permute(2, 0, 1, 3).flatten(1)

    return attend


def tokens_attention(
    positions: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Attend:
    """For one token of each sequence; the sequences are given in order of length."""
    groups = _groups(positions, block_ids, block_size, dtype, device)

    def attend(queries: Tensor, keys: Ranks, values: Ranks) -> Tensor:
        outs = []
        for rows, own_blocks, mask in groups:
            # For a single query, the heads that share a KV head act as that many queries.
            q = queries[rows]
            k, v = (
                blocks.view(len(q), -1, *blocks.shape[2:]).transpose(1, 2)
                for blocks in (_gathered(ranks, own_blocks) for ranks in (keys, values))
            )
            q = q.view(len(q), k.shape[1], -1, q.shape[2])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            outs.append(out.flatten(1))
        return torch.cat(outs)

    return attend


def _gathered(ranks: Ranks, block_ids: Tensor) -> Tensor:
    """Those blocks with the heads of all ranks, on the device of `block_ids`."""
    if len(ranks) == 1:
        return ranks[0].index_select(0, block_ids)
    parts = (rank.index_select(0, block_ids.to(rank.device)) for rank in ranks)
    return torch.cat([part.to(block_ids.device) for part in parts], dim=2)


def _groups(
    positions: Sequence[int],
    block_ids: Sequence[Sequence[int]],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[_Group]:
    """Groups of sequences whose size padding at most doubles."""
    groups = []
    last = [position // block_size for position in positions]
    for _, alike in groupby(range(len(last)), key=lambda row: last[row].bit_length()):
        rows = list(alike)
        num_blocks = last[rows[-1]] + 1
        padded: list[int] = []
        for row in rows:
            # Padded with a block of its own, as any other might hold values that are not finite.
            padding = [block_ids[row][0]] * (num_blocks - last[row] - 1)
            padded += [*block_ids[row][: last[row] + 1], *padding]
        at = torch.arange(num_blocks * block_size, device=device)
        ends = torch.tensor([positions[row] for row in rows], device=device)
        mask = _masked(at > ends.view(-1, 1, 1, 1), dtype)
        own_blocks = torch.tensor(padded, dtype=torch.int64, device=device)
        groups.append(_Group(slice(rows[0], rows[-1] + 1), own_blocks, mask))
    return groups


def _masked(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to scores: minus infinity where `hidden`, otherwise nothing."""
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return zeros.masked_fill_(hidden, -torch.inf)
