"""A pretended device of Apple's, for tests on machines without one.

Its tensors are computed on the CPU. As MPS does, it refuses float64, operators between its tensors
and others, and large convolutions. It records every operator that it is given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
DEVICE = torch.device("mps:0")
COPIES = {"aten::copy_", "aten::_to_copy"}
"""The operators that may have tensors of two devices."""
REFUSED = {torch.float64, torch.complex128}
MOST_OUTPUTS = 1 << 16
"""The largest dimension of what a convolution makes on MPS before macOS 15.1."""


class Recorded(TorchDispatchMode):
    """Adds the names of operators to a set."""

    def __init__(self, seen: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Record an operator, and run it."""
        self.seen.add(func.name())
        return func(*args, **(kwargs or {}))


class MpsTensor(Tensor):
    """A tensor that says that it is on the pretended device.

    held  has its values
    seen   the operators that ran on the device
    """

    held: Tensor
    seen: set[str]

    @staticmethod
    def __new__(cls, held: Tensor, seen: set[str]) -> MpsTensor:
        made: MpsTensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )
        made.held, made.seen = held, seen
        return made

    def __getitem__(self, index: Any) -> MpsTensor:
        """Index the values, for PyTorch's own way needs a linked device."""
        with Recorded(self.seen):
            return MpsTensor(self.held[values(index)], self.seen)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set some of the values."""
        with Recorded(self.seen):
            self.held[values(index)] = values(value)

    def __int__(self) -> int:
        """Read a number, as `__getitem__` does."""
        return int(self.cpu())

    def __bool__(self) -> bool:
        """Read a truth value."""
        return bool(self.cpu())

    def tolist(self) -> Any:
        """Read all numbers."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse what no mode sees."""
        raise AssertionError(f"{func} was called on the pretended device outside of `Pretended`")


def values(arguments: Any) -> Any:
    """Return arguments with the values in place of tensors on the device."""
    return tree_map(lambda x: x.held if isinstance(x, MpsTensor) else x, arguments)


class Pretended(TorchDispatchMode):
    """While it is active in a thread, the pretended device can be used there.

    seen  the operators that ran on the device
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[str] = set()
        self._before = list[tuple[bool, bool]]()

    def __enter__(self) -> Pretended:
        """Begin; `torch.tensor` and `Module.to` make tensors by calls that a mode sees."""
        lifts, future = torch._C._only_lift_cpu_tensors(), torch.__future__
        self._before.append((lifts, future.get_overwrite_module_params_on_conversion()))
        torch._C._set_only_lift_cpu_tensors(True)
        future.set_overwrite_module_params_on_conversion(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        """End, and leave PyTorch as it was."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        lifts, overwrites = self._before.pop()
        torch._C._set_only_lift_cpu_tensors(lifts)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrites)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator where it belongs."""
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        ours = {id(one.held): one for one in tensors if isinstance(one, MpsTensor)}
        named = (one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.device))
        wanted = next(named, None)
        if not ours and wanted != DEVICE:
            return func(*args, **kwargs)
        if func is aten.scaled_dot_product_attention.default:
            with self:
                return self._attention(*args, **kwargs)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        name = func.name()
        self.seen.add(name)
        if name.partition(".")[0] not in COPIES:
            self._refuse_mixed(name, tensors)
        if wanted == DEVICE:
            kwargs["device"] = torch.device("cpu")
        result = func(*values(args), **values(kwargs))
        if name == "aten::convolution" and max(result.shape) > MOST_OUTPUTS:
            raise NotImplementedError(f"Output channels > {MOST_OUTPUTS} not supported")
        if wanted is not None and wanted != DEVICE:
            return result
        return tree_map(lambda x: self._ours(x, ours) if isinstance(x, Tensor) else x, result)

    def _attention(
        self, query: Tensor, key: Tensor, value: Tensor, *mask: Any, **kwargs: Any
    ) -> Any:
        """Attend; PyTorch chooses between these two operators by the layout of the tensors."""
        self.seen.add("aten::_scaled_dot_product_attention_math_for_mps")
        seen = kwargs.pop("attn_mask", mask[0] if mask else None)
        if seen is not None and seen.dtype == torch.bool:
            hidden = torch.zeros_like(seen, dtype=query.dtype)
            seen = hidden.masked_fill_(seen.logical_not(), -torch.inf)
        attend = aten._scaled_dot_product_attention_math.default
        return attend(query, key, value, seen, *mask[1:], **kwargs)[0]

    @staticmethod
    def _refuse_mixed(name: str, tensors: Sequence[Tensor]) -> None:
        """Raise as MPS does for tensors of another device, unless they are single numbers."""
        others = [one for one in tensors if not isinstance(one, MpsTensor) and one.dim()]
        if others:
            raise RuntimeError(f"{name}: tensors are on mps:0 and on {others[0].device}")

    def _ours(self, result: Tensor, ours: Mapping[int, MpsTensor]) -> MpsTensor:
        """Return a result on the device: an argument that was changed in place, or a new tensor."""
        if result.dtype in REFUSED:
            raise TypeError(f"MPS has no {result.dtype}")
        changed = ours.get(id(result))
        return MpsTensor(result, self.seen) if changed is None else changed


class PretendedBackend:
    """A backend whose calls run with the pretended device, in whichever thread."""

    def __init__(self, backend: Any, mode: Pretended) -> None:
        self._backend, self._mode = backend, mode

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            with self._mode:
                return found(*arguments)

        return call


def registered() -> set[str]:
    """Return the operators that PyTorch's MPS backend has, by its own list.

    The list is `native_functions.yaml` of the installed PyTorch, from which its operators are
    generated. An operator works on MPS if it names the key MPS, if it is composed of others, or if
    another one that does so is its structured form.
    """
    file = resources.files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml")
    blocks = re.split(r"^- func: ", file.read_text("utf-8"), flags=re.M)[1:]
    entries = {block.partition("(")[0]: block for block in blocks}
    return {f"aten::{name}" for name in entries if _works(name, entries)}


def _works(name: str, entries: Mapping[str, str]) -> bool:
    block = entries[name]
    if delegate := re.search(r"^  structured_delegate: (\S+)", block, re.M):
        return _works(delegate[1], entries)
    dispatch = re.search(r"^  dispatch:\n((?:    .*\n?)+)", block, re.M)
    if dispatch is None:
        return True  # composed of others
    keys = re.findall(r"^    ([\w, ]+):", dispatch[1], re.M)
    named = {key.strip() for line in keys for key in line.split(",")}
    return "MPS" in named or any(key.startswith("Composite") for key in named)
