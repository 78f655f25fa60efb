"""A stand-in for CUDA graphs on a CPU: it records the operations of a step and plays them again.

Not the Python function is called again but the operations that it led to, on the very tensors that they had, with the
numbers that Python gave them then. So a position or a length that went into the step as a Python number gives wrong
results in a later step, as it would from a graph; and what a graph cannot record is refused: operations whose result
Python must know, whose shape depends on numbers, or that bring numbers from the host.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Mode: Any = TorchDispatchMode  # torch does not say its types
REFUSED = (
    *(
        "_local_scalar_dense",
        "is_nonzero",
        "equal",
        "allclose",
        "item",
        "isclose",
    ),  # the host waits for a number
    *(
        "nonzero",
        "masked_select",
        "unique",
        "_unique2",
        "bincount",
        "argwhere",
        "repeat_interleave.Tensor",
    ),  # shapes
)


class Tape(Mode):  # type: ignore[misc]  # a class of torch
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        if name in REFUSED or name.split(".")[0] in REFUSED:
            raise RuntimeError(f"{func} cannot be recorded")
        indices = args[1] if name.startswith(("index.Tensor", "index_put")) else ()
        if any(one is not None and one.dtype == torch.bool for one in indices):
            raise RuntimeError(f"{func} by a mask cannot be recorded: its shape depends on numbers")
        out = func(*args, **(kwargs or {}))
        if name.startswith("lift_fresh") and out.dim():
            raise RuntimeError("numbers from the host cannot be recorded")
        self.operations.append((func, args, kwargs or {}, out))
        return out

    def play(self) -> None:
        made: dict[int, torch.Tensor] = {}

        def now(given: Any) -> Any:
            return made.get(id(given), given) if isinstance(given, torch.Tensor) else given

        for func, args, kwargs, out in self.operations:
            found = func(*tree_map(now, args), **tree_map(now, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(found), strict=True):
                if isinstance(old, torch.Tensor):
                    made[id(old)] = new


def record(step: Callable[[], None]) -> Callable[[], None]:
    """A cuda_graphs.Capture."""
    tape = Tape()
    with tape:
        step()
    return tape.play
