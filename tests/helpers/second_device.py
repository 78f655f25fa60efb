"""A second device with data, `npu`: tensors that live apart from the CPU's, as a GPU's do, computed on the CPU.

Built on torch's private backend for Python. An operation on tensors of two devices fails, and so does one that reads a
tensor as NumPy. In the sampling thread, so does a second wait for the device in one step. `install` is called in a
process of its own: a backend cannot be removed.
"""

import threading
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

NAME = "npu"
# Operations that may mix devices: they are how data moves, and indices may be anywhere.
FREE = {
    "copy_",
    "_to_copy",
    "to",
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "set_",
    "detach",
} | {"_has_compatible_shallow_copy_type"}
PRODUCTS = {"mm", "addmm", "bmm", "matmul", "linear"}
_waited = threading.local()
Disabled: Any = torch._C._disabled_torch_function_impl


class Apart(torch.Tensor):
    """A tensor of the second device; `data_there` are its numbers."""

    __torch_function__ = Disabled
    data_there: torch.Tensor

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        where = {
            "strides": data.stride(),
            "storage_offset": data.storage_offset(),
            "device": torch.device(NAME, 0),
        }
        return make(cls, data.shape, dtype=data.dtype, **where)

    def __init__(self, data: torch.Tensor) -> None:
        self.data_there = data

    def untyped_storage(self) -> Any:
        """Where its numbers lie; files tell tied weights by it."""
        return self.data_there.untyped_storage()

    def data_ptr(self) -> int:
        return self.data_there.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a static function
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, leaves = func.overloadpacket.__name__, tree_leaves((args, kwargs or {}))
        target = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
        to_cpu = target is not None and target.type == "cpu"
        into_cpu = name == "copy_" and not isinstance(args[0], Apart)
        if name not in FREE:
            wrong = [
                t
                for t in leaves
                if isinstance(t, torch.Tensor) and not isinstance(t, Apart) and t.dim()
            ]
            assert not wrong, (
                f"{func}: a tensor {tuple(wrong[0].shape)} of the CPU among those of {NAME}"
            )
        _wait(name, name == "_local_scalar_dense", to_cpu or into_cpu)
        given = {id(leaf.data_there): leaf for leaf in leaves if isinstance(leaf, Apart)}
        out = func(*tree_map(_there, args), **tree_map(_there, kwargs or {}))
        return (
            out if to_cpu or into_cpu else tree_map(lambda one: given.get(id(one), _here(one)), out)
        )


def _there(one: Any) -> Any:
    if isinstance(one, Apart):
        return one.data_there
    return torch.device("cpu") if isinstance(one, torch.device) else one


def _here(one: Any) -> Any:
    return Apart(one) if isinstance(one, torch.Tensor) and not isinstance(one, Apart) else one


def _wait(name: str, reads: bool, moves: bool) -> None:
    """Fail where the sampling thread waits for the device twice in a step, or for a single number."""
    if not threading.current_thread().name.startswith("policy"):
        return
    if name in PRODUCTS:
        _waited.once = False
    if moves or reads:
        assert not reads and not getattr(_waited, "once", False), (
            f"a step waits for the device by {name}"
        )
        _waited.once = True


def install() -> None:
    """Make the device `npu` known to this process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup

    make: Any = setup
    make(NAME)
    library: Any = torch.library
    library = library.Library("aten", "IMPL")

    def empty(size: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
        return Apart(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, dtype: Any = None, *_: Any, **__: Any) -> Any:
        return Apart(torch.empty_strided(size, stride, dtype=dtype))

    def copy_from(source: Any, target: Any, *_: Any) -> Any:
        _there(target).copy_(_there(source))
        return target

    for operation, made in (
        ("empty.memory_format", empty),
        ("empty_strided", empty_strided),
        ("_copy_from", copy_from),
    ):
        library.impl(operation, made, "PrivateUse1")
    globals()["_library"] = library  # it ends with its object
    torch.autograd.set_multithreading_enabled(False)  # the device has no threads of its own
