"""Replaces sharded parameters that autograd saves by their place in a unit, which is gathered again at use.

Without this the graph would hold the unit's memory, or find it resharded. The hooks are those of
``torch.autograd.graph.saved_tensors_hooks``, active during the forward pass of a module whose unit is
sharded. They work for any output of a module, for a second backward pass, for ``vmap`` and for the backward
pass of an inner loss alone, because each saved tensor brings its unit back.

torch gives an unpacked tensor a new Python object, but a script's own ``autograd.Function`` may count on
``ctx.saved_tensors`` being the parameters themselves, as it is without hooks: TRL's gathers a saved weight by
its ``ds_status``. So what lies exactly where a parameter lies is given to a Function as that parameter.

``torch.func.grad`` and its kin refuse to be called while such hooks are active. A model that calls them in
its forward pass needs ``ZLAUNCH_SAVED_TENSOR_HOOKS=0``: its units then stay whole from their first use to the
end of the backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ..environment import read_environment
from ..errors import UnsupportedError
from . import placeholder
from .unit import Unit

# -- saved tensor hooks -----------------------------------------------------------------------------
#
# Finds and sets the hooks on saved tensors that are active on this thread.


Hooks: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""Holds a pack and an unpack function."""

_autograd: Any = torch._C._autograd


class _Entered(threading.local):
    def __init__(self) -> None:
        self.hooks: list[Hooks] = []


def _follow() -> Callable[[], Hooks | None]:
    """Track each push and pop from now on, for a torch (2.6) that does not tell which hooks are active.

    ``torch.autograd.graph.saved_tensors_hooks`` looks these functions up at each use.
    """
    entered = _Entered()
    real_push = _autograd._push_saved_tensors_default_hooks
    real_pop = _autograd._pop_saved_tensors_default_hooks

    def push(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        real_push(pack, unpack)  # raises where hooks are disabled
        entered.hooks.append((pack, unpack))

    def pop() -> None:
        try:
            real_pop()
        except RuntimeError:
            # torch has dropped them: the backward pass in which they were pushed ended in an exception
            if not entered.hooks:
                raise
            entered.hooks.clear()
        if entered.hooks:  # empty where torch brought them to a thread of the backward pass
            entered.hooks.pop()

    _autograd._push_saved_tensors_default_hooks = push
    _autograd._pop_saved_tensors_default_hooks = pop
    return lambda: entered.hooks[-1] if entered.hooks else None


if hasattr(_autograd, "_top_saved_tensors_default_hooks"):
    top: Callable[[], Hooks | None] = partial(_autograd._top_saved_tensors_default_hooks, False)
else:
    top = _follow()


def push(hooks: Hooks) -> None:
    """Activate these hooks, above those that are active."""
    _autograd._push_saved_tensors_default_hooks(*hooks)


def pop() -> None:
    """Deactivate the top hooks."""
    _autograd._pop_saved_tensors_default_hooks()


def allowed() -> bool:
    """Tell whether torch lets hooks be activated: not inside ``torch.func.grad``."""
    return bool(_autograd._saved_tensors_hooks_is_enabled())


# -- saved tensors ----------------------------------------------------------------------------------


_sharded: WeakValueDictionary[int, Unit] = WeakValueDictionary()
"""Maps the identity of a unit's memory to the unit, for the sharded units of every model in this process."""


class _Place:
    """Describes a view of a unit's flat buffer that the graph will need."""

    __slots__ = ("_generation", "_parameter", "_size", "_start", "_stride", "_unit", "part")

    def __init__(self, unit: Unit, tensor: Tensor) -> None:
        self.part: _PartCall | None = None
        """Holds what the call of the part has saved, in a region that torch recomputes."""
        self._unit = unit
        self._generation = unit.generation
        self._size = tensor.size()
        self._stride = tensor.stride()
        self._start = int(tensor.storage_offset())
        self._parameter = unit.parameter_at(self._start)

    def tensor(self) -> Tensor:
        unit = self._unit
        if unit.generation != self._generation:
            name = unit.names[self._parameter]
            raise RuntimeError(
                f"the backward pass needs the value of {name} from its forward pass, but an optimizer step, "
                "a load, unfreezing or engine.destroy() has changed it: call backward before these"
            )
        if self.part is not None:
            self.part.recompute()
        unit.wait_unsharded(rounded=True)
        # by way of the parameter, whose version counter a step moves and a gather does not
        own = unit.parameters[self._parameter].detach()
        return own.as_strided(self._size, self._stride, self._start)


class _Kept:
    """Keeps any other saved tensor, with the check for changes in place that autograd makes without hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        # a node that saves its own output must not own it
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: a tensor of shape {list(self._tensor.shape)} is at version "
                f"{self._tensor._version}; expected version {self._version} instead"
            )
        return self._tensor


class _Foreign:
    """Keeps a tensor that the hooks around these have packed."""

    __slots__ = ("_early", "_packed", "_unpack", "_unpacked_in")

    def __init__(self, packed: Any, unpack: Callable[[Any], Tensor]) -> None:
        self._packed = packed
        self._unpack = unpack
        self._unpacked_in = -1
        """Holds the number of the backward pass that has unpacked it: torch allows each to do so once."""
        self._early: Tensor | None = None
        """Holds the tensor from an early unpacking to its use."""

    def fetch(self) -> None:
        """Unpack the tensor before its use, unless this backward pass has unpacked it."""
        if self._unpacked_in != placeholder.backward_number():
            self._early = self.tensor()

    def tensor(self) -> Tensor:
        early = self._early
        self._early = None
        number = placeholder.backward_number()
        if early is not None and self._unpacked_in == number:
            return early
        self._unpacked_in = number
        return self._unpack(self._packed)


class _PartCall:
    """Leads from a part's weights to the recomputation of its call.

    Whether autograd unpacks the weight of a product or its input first depends on the operation (``mm`` has
    the weight first, ``addmm`` the input). A weight that is gathered before the recomputation would stay
    through all of it, beside the parts that it gathers.
    """

    __slots__ = ("saved",)

    def __init__(self) -> None:
        self.saved: _Foreign | None = None
        """Holds the first tensor that the call has saved, besides weights."""

    def recompute(self) -> None:
        """Let torch recompute the region, unless this backward pass has."""
        if self.saved is not None:
            self.saved.fetch()


class SavedTensors:
    """Packs what autograd saves for one model; its outermost module that is called activates the hooks."""

    def __init__(self, on_use: Callable[[], None]) -> None:
        """Prepare the hooks; ``on_use`` is called before a saved place of a unit is gathered again."""
        self._on_use = on_use
        self._units: dict[int, Unit] = {}
        self._owner: object = None
        self._depth = 0
        self._outer: Hooks | None = None
        self._hooks = (self._pack, self._unpack)
        self._parts: list[tuple[object, Hooks, Hooks]] = []
        """Lists the parts that are called in a region that torch recomputes, with our hooks and torch's."""
        self._enabled = read_environment().saved_tensor_hooks

    def watch(self, units: Iterable[Unit]) -> None:
        """Set the units that are watched, instead of the former ones."""
        self._units = {unit.memory: unit for unit in units if unit.shard_params}
        if self._units:
            _sharded.update(self._units)
            _give_parameters_back()

    def enter(self, module: object) -> bool:
        """Begin a call of ``module``. Returns False where autograd cannot take hooks (inside
        ``torch.func.grad``): then no unit may be resharded before the graph's end.

        Around a region that torch recomputes only torch's hooks may be active: it counts what is saved, and
        saves nothing.
        """
        if self._owner is not None:
            self._depth += module is self._owner
            return True
        if not torch.is_grad_enabled() or not self._units:
            return True
        if not self._enabled or not allowed():
            return False
        outer = top()
        if outer is not None and outer[0] == self._hooks[0]:  # left in place: others were above them
            pop()
            outer = top()
        self._outer = outer
        if outer is not None and _is_recomputed(outer[0]):
            return True
        push(self._hooks)
        self._owner = module
        self._depth = 1
        return True

    def leave(self, module: object) -> None:
        """End a call of ``module``."""
        if module is not self._owner:
            return
        self._depth -= 1
        if self._depth == 0:
            self._deactivate()

    def enter_part(self, module: object) -> bool:
        """Begin a call of a divided block's part. Returns False as :meth:`enter`.

        In a region that torch recomputes, torch's hooks would keep the part's weights themselves from the
        recomputation to their gradients. Ours go above them here, in the region's first run and in its
        recomputations, so torch counts the same tensors in each: all but the weights, which are places.
        """
        below = top()
        if below is None or not self._units or not _is_recomputed(below[0]):
            return True
        if not self._enabled or not allowed():
            return False

        call = _PartCall()

        def pack(tensor: Tensor) -> _Place | _Foreign:
            place = self._place(tensor)
            if place is not None:
                place.part = call
                return place
            saved = _Foreign(below[0](tensor), below[1])
            call.saved = call.saved or saved
            return saved

        hooks = pack, self._unpack
        push(hooks)
        self._parts.append((module, hooks, below))
        return True

    def leave_part(self, module: object) -> None:
        """End a call of a part."""
        if self._parts and self._parts[-1][0] is module:
            self._parts.pop()
            pop()

    def reset(self) -> None:
        """Deactivate the hooks, if they are active.

        Where calls of parts were cut off (for an interrupt torch calls no module hooks), torch's contexts
        have deactivated the top hooks at their ends, ours in place of their own: as many are left as parts.
        """
        left = [pair[0] for _, hooks, below in self._parts for pair in (hooks, below)]
        for _ in self._parts:
            active = top()
            if active is not None and active[0] in left:
                pop()
        self._parts.clear()
        self._deactivate()

    def _deactivate(self) -> None:
        if self._owner is None:
            return
        self._owner = None
        self._depth = 0
        innermost = top()
        if innermost is not None and innermost[0] == self._hooks[0]:
            pop()

    def _pack(self, tensor: Tensor) -> _Place | _Kept | _Foreign:
        place = self._place(tensor)
        if place is not None:
            return place
        if self._outer is not None:
            return _Foreign(self._outer[0](tensor), self._outer[1])
        return _Kept(tensor)

    def _place(self, tensor: Tensor) -> _Place | None:
        """Return the place of a tensor on a unit's memory; None for others."""
        try:
            unit = self._units.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # sparse, or a wrapper without memory
            return None
        if unit is None or tensor.dtype != unit.dtype or tensor.is_neg():
            return None
        return _Place(unit, tensor)

    def _unpack(self, packed: _Place | _Kept | _Foreign) -> Tensor:
        if type(packed) is _Place:
            self._on_use()
        return packed.tensor()


@cache
def _give_parameters_back() -> None:
    """Let ``ctx.saved_tensors`` of every ``autograd.Function`` have parameters in place of tensors on their
    memory, from now on.

    Not where a graph of the backward pass is made: it would save the parameter without hooks, and find it
    resharded. A tensor keeps the memory.
    """
    unpack: Any = torch._C._FunctionBase.saved_tensors

    def saved_tensors(ctx: BackwardCFunction) -> tuple[Tensor | None, ...]:
        unpacked: tuple[Tensor | None, ...] = unpack.__get__(ctx)
        if torch.is_grad_enabled():
            return unpacked
        return tuple(None if each is None else _as_parameter(each) for each in unpacked)

    BackwardCFunction.saved_tensors = property(saved_tensors)  # type: ignore[assignment]


def _as_parameter(tensor: Tensor) -> Tensor:
    """Return the parameter of a sharded unit that lies where an unpacked tensor lies; else the tensor."""
    try:
        unit = _sharded.get(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, or a wrapper without memory
        return tensor
    if unit is None or not unit.parameters or not tensor.is_leaf:
        return tensor
    parameter = unit.parameters[unit.parameter_at(int(tensor.storage_offset()))]
    with torch._C.DisableTorchFunctionSubclass():  # to look at a sharded parameter is not to use it
        same = (
            parameter.data_ptr() == tensor.data_ptr()
            and parameter.dtype == tensor.dtype
            and parameter.shape == tensor.shape
            and parameter.stride() == tensor.stride()
            and parameter.requires_grad == tensor.requires_grad  # a detached one was saved detached
        )
    return parameter if same else tensor


_NO_CHANGE = nullcontext()


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context that works on real tensors, also within ``torch.func`` transforms, and hides what it
    does from selective checkpoints: they count operations, and a recomputation gathers other blocks ahead.
    """
    # A transform may begin and end inside a pass, so each hook that moves units asks; it asks once for all
    # of them, and outside of transforms the question is all that it costs.
    transformed = torch._C._functorch.peek_interpreter_stack() is not None
    if not transformed and not torch._C._len_torch_dispatch_stack():
        return _NO_CHANGE
    contexts = ExitStack()
    if transformed:
        contexts.enter_context(temporarily_clear_interpreter_stack())
    if any(_is_recomputed(type(mode)) for mode in _get_current_dispatch_mode_stack()):
        contexts.enter_context(_disable_current_modes())
    return contexts


def explained(error: BaseException) -> UnsupportedError | None:
    """Return an error that says what to do if torch refuses to be called under the hooks; None for others."""
    if "support saved tensor hooks" not in str(error):
        return None
    return UnsupportedError(
        "torch.func transforms (grad, vjp, jacrev, hessian) inside the forward pass of a stage 3 model need "
        "the environment variable ZLAUNCH_SAVED_TENSOR_HOOKS=0. Sharded parameters then stay unsharded from "
        "first use to the end of the backward pass"
    )


def _is_recomputed(pack: Callable[..., Any]) -> bool:
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"
