"""Which engines take as many tokens as a request needs: contexts differ between workers."""

from __future__ import annotations

from math import inf

import numpy as np
from numpy.typing import NDArray

from app.core.errors import NoWorkers, PromptTooLarge
from app.policy.view import View

Mask = NDArray[np.bool_]


def fitting(view: View, allowed: Mask, num_tokens: int) -> Mask:
    """Those of the `allowed` workers, (workers,), whose engines take a prompt and an answer of so
    many tokens together.

    Raises PromptTooLarge if no worker does, and NoWorkers if none of the allowed does.
    """
    fits = allowed & (view.contexts.tokens >= num_tokens)
    if np.count_nonzero(fits) or not np.count_nonzero(allowed):
        return fits
    known = (*view.infos, *view.paused.values(), *view.lapsed.values())
    longest = max(info.max_model_len or inf for info in known)
    needs = f"a prompt and its answer of {num_tokens:,} tokens"
    if longest < num_tokens:
        raise PromptTooLarge(f"{needs} fit into no worker: none takes more than {longest:,}")
    raise NoWorkers(f"{needs} fit only into workers that get no requests, or not this one, now")
