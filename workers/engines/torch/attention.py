"""Attention over paged KV: for a chunk of one sequence, and for a token of each of several.

KV may be split among tensor-parallel ranks by heads. Attention is computed over all heads at once
all the same: with fewer of them, the kernels of CPUs and GPUs give other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Ranks = Sequence[Tensor]
"""Keys or values of a layer, by rank: (num_blocks, block_size, num_heads, head_size) of the pool.
"""
Attend = Callable[[Tensor, Ranks, Ranks], Tensor]
"""(queries, keys, values) of a layer -> (num_tokens, num_heads * head_size).

queries: (num_tokens, num_heads, head_size). Keys and values include the tokens' own.
"""


def chunk_attention(own_blocks: Tensor, start: int, end: int, dtype: torch.dtype) -> Attend:
    """Returns the attention of the tokens from `start` to `end` of a sequence with these blocks."""
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
    tables: Sequence[Tensor], positions: Tensor, block_size: int, dtype: torch.dtype
) -> Attend:
    """Returns the attention of one token of each sequence. Nothing in it waits for the device.

    tables: of groups of sequences, which attend together: (num_seqs, num_blocks) each, a row for
    the blocks of each sequence. positions: (num_seqs of all,); what lies beyond them is masked.
    """
    sizes = [len(table) for table in tables]
    masks = []
    for table, ends in zip(tables, torch.split(positions, sizes), strict=True):
        at = torch.arange(table.shape[1] * block_size, device=table.device)
        masks.append(_masked(at > ends.view(-1, 1, 1, 1), dtype))

    def attend(queries: Tensor, keys: Ranks, values: Ranks) -> Tensor:
        outs = []
        for q, table, mask in zip(torch.split(queries, sizes), tables, masks, strict=True):
            # For a single query, the heads that share a KV head act as that many queries.
            k, v = (
                blocks.view(len(q), -1, *blocks.shape[2:]).transpose(1, 2)
                for blocks in (_gathered(ranks, table.flatten()) for ranks in (keys, values))
            )
            q = q.view(len(q), k.shape[1], -1, q.shape[2])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            outs.append(out.flatten(1))
        return torch.cat(outs)

    return attend


def _gathered(ranks: Ranks, block_ids: Tensor) -> Tensor:
    """Returns these blocks with the heads of all ranks, on the device of `block_ids`."""
    if len(ranks) == 1:
        return ranks[0].index_select(0, block_ids)
    parts = (rank.index_select(0, block_ids.to(rank.device)) for rank in ranks)
    return torch.cat([part.to(block_ids.device) for part in parts], dim=2)


def groups_of(
    positions: Sequence[int], block_ids: Sequence[Sequence[int]], block_size: int
) -> list[list[list[int]]]:
    """Returns tables of sequences whose size padding at most doubles, in order; sequences come by
    length.

    block_ids: of each sequence, those up to its position at least.
    """
    counts = [position // block_size + 1 for position in positions]
    groups = []
    for _, alike in groupby(range(len(counts)), key=lambda row: (counts[row] - 1).bit_length()):
        rows = list(alike)
        most = counts[rows[-1]]
        # With a block of its own, as any other might hold values that are not finite.
        own = [[*block_ids[row][: counts[row]]] for row in rows]
        groups.append([ids + ids[:1] * (most - len(ids)) for ids in own])
    return groups


def _masked(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns what to add to scores: minus infinity where `hidden`, otherwise nothing."""
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return zeros.masked_fill_(hidden, -torch.inf)
