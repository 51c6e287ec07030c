"""A graph that repeats as CUDA's do, and no more than that, in host memory."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = "_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "_unique2"
"""Operations for which the host would wait, or which bring numbers from it."""


class RecordedGraph(TorchDispatchMode):
    """What ran once is repeated operation by operation, on the same memory.

    Nothing of Python runs again. Memory that was allocated meanwhile is anybody's between two runs.
    """

    def __init__(self, work):
        super().__init__()
        self._operations = []
        with self:
            work()
        self._spoil()

    @classmethod
    def record(cls, work):
        """See Record."""
        return cls(work).replay

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        name = func.overloadpacket.__name__
        if name in WAITS:
            raise RuntimeError(f"{name} cannot be recorded")
        result = func(*args, **(kwargs or {}))
        theirs = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        new = [
            leaf for leaf in tree_leaves(result) if _is_tensor(leaf) and _memory(leaf) not in theirs
        ]
        self._operations.append((func, args, kwargs or {}, new))
        return result

    @torch.inference_mode()
    def replay(self):
        for func, args, kwargs, outputs in self._operations:
            result = func(*args, **kwargs)
            again = [leaf for leaf in tree_leaves(result) if _is_tensor(leaf)]
            for output, value in zip(outputs, again[: len(outputs)], strict=True):
                output.copy_(value)
        self._spoil()

    @torch.inference_mode()
    def _spoil(self):
        for *_, outputs in self._operations:
            for output in outputs:
                output.fill_(torch.nan if output.is_floating_point() else 0)


def _is_tensor(leaf):
    return isinstance(leaf, Tensor)


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()
