"""Decides when each block of a plain module is gathered, resharded and reduced, by hooks on the module.

See Note [When does what happen] in ``ShardedModel``.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from enum import IntEnum, auto
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Comm
from ..comm.process_group import open_comms
from ..errors import DiskError, PeerLost
from . import placeholder
from .placeholder import UnitState
from .policy import Block, ShardingOptions
from .reduce import GradientReducer
from .saved_tensors import SavedTensors, outside_transforms
from .tensors import Hook, arm, tensors_in
from .unit import LiveElements, Unit, owner_of

# -- passes -----------------------------------------------------------------------------------------
#
# Knows whether a forward or backward pass of a model is going on, and in which thread.


_began = itertools.count(1)
"""Numbers the passes of all models, so that the innermost of several is known."""


class Phase(IntEnum):
    """Says what a model is doing."""

    IDLE = auto()
    """Means that no pass is going on."""
    FORWARD = auto()
    """Means that the model is being called."""
    BACKWARD = auto()
    """Means that gradients are on their way, perhaps inside a call of the model (autograd.grad there)."""


_ALLOWED = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD},
    Phase.FORWARD: {Phase.IDLE, Phase.BACKWARD},
    Phase.BACKWARD: {Phase.IDLE, Phase.FORWARD},
}
"""Lists the phases that may follow each."""


class Pass:
    """Tracks the passes of one model, also a forward pass that calls the model again."""

    def __init__(self, *, one_thread: bool) -> None:
        """Track no pass yet; with ``one_thread``, refuse that two threads use the model at a time."""
        self.phase = Phase.IDLE
        self.is_backward = False
        """Tells that a backward pass has begun and not ended. It is kept, because each gradient asks."""
        self.depth = 0
        """Counts the calls of the model that are going on, one inside the other."""
        self._one_thread = one_thread
        self._since = 0
        self._caller: FrameType | None = None

    def current_id(self) -> int:
        """Return the number of the pass that the calling code is part of; 0 if it is part of none, also after
        one that an exception has ended unnoticed.
        """
        if self.phase is Phase.BACKWARD:
            return self._since if placeholder.in_backward() else 0
        if self.phase is Phase.FORWARD and (self._caller is None or _is_above(self._caller, sys._getframe())):
            return self._since
        return 0

    def begin(self, hook: FrameType) -> None:
        """Note a call of the model; ``hook`` is the frame of its pre-hook."""
        if not self.depth:
            self._move(Phase.FORWARD)
            self._caller = _module_call(hook)
        self.depth += 1

    def end(self) -> None:
        """Note the end of a call."""
        if self.depth > 1:
            self.depth -= 1
        else:
            self.reset()

    def reset(self) -> None:
        """Note that no call is going on any more."""
        self.depth = 0
        self._caller = None
        if self.phase is Phase.FORWARD:
            self._move(Phase.IDLE)

    def begin_backward(self) -> None:
        """Note the first gradient of a backward pass."""
        self._move(Phase.BACKWARD)

    def end_backward(self) -> None:
        """Note that the backward pass has ended, or that an exception has ended it."""
        self._move(Phase.FORWARD if self.depth else Phase.IDLE)

    def _move(self, to: Phase) -> None:
        assert to in _ALLOWED[self.phase], f"{self.phase.name} -> {to.name}"
        self.phase = to
        self._since = next(_began)
        self.is_backward = to is Phase.BACKWARD

    def was_cut_off(self) -> bool:
        """Tell whether the pass has ended unnoticed: for an interrupt torch calls no hooks. Raises
        RuntimeError if another thread is in the model.
        """
        if not self.depth or self._caller is None or _is_above(self._caller, sys._getframe()):
            return False
        running = any(_is_above(self._caller, frame) for frame in sys._current_frames().values())
        if running and self._one_thread:
            raise RuntimeError(
                "another thread is calling this model: at stage 3, only one thread at a time can use a model"
            )
        return not running


def _module_call(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the module call that a hook is part of; it lives as long as the pass."""
    while frame is not None and frame.f_globals.get("__name__") != "torch.nn.modules.module":
        frame = frame.f_back
    return frame


def _is_above(wanted: FrameType | None, frame: FrameType | None) -> bool:
    """Tell whether ``wanted`` is on the stack that ends with ``frame``."""
    while frame is not None:
        if frame is wanted:
            return True
        frame = frame.f_back
    return False


# -- prefetch ---------------------------------------------------------------------------------------
#
# Gathers ahead the blocks that followed last time: a hint, never a requirement.


class OrderHint:
    """Remembers which block followed which in the last complete pass. The recomputation of a block counts as
    another block, ``~index``.
    """

    def __init__(self) -> None:
        self.followers: dict[int, int] = {}
        """Maps each block to the one that followed it. Another object after each pass."""
        self.first: int | None = None
        """Holds the block that the last complete pass began with."""
        self.late: set[int] = set()
        """Holds the blocks that the last complete pass recomputed after their outputs had had gradients: they
        are not used before.
        """
        self._now: list[int] = []
        self._late_now: set[int] = set()
        self._last: int | None = None

    def visit(self, block: int, *, is_late: bool = False) -> None:
        """Note that ``block`` is used now, or recomputed after its output had a gradient (``is_late``)."""
        if is_late:
            self._late_now.add(~block)
        if not self._now or self._now[-1] != block:
            self._now.append(block)

    def after(self, block: int) -> int | None:
        """Return the block that followed ``block`` last time, or None."""
        return self.followers.get(block)

    def is_last(self, block: int) -> bool:
        """Tell whether the last pass ended with ``block``."""
        return self._last == block

    def end(self) -> None:
        """End the pass, whose order becomes the hint."""
        if self._now:
            self.followers = {}
            for current, following in zip(self._now, self._now[1:], strict=False):
                # A block that is used several times is followed by what came after its first use.
                self.followers.setdefault(current, following)
            self.first = self._now[0]
            self._last = self._now[-1]
            self.late = self._late_now
        self._now = []
        self._late_now = set()


class Prefetch:
    """Starts gathers before their block is called.

    Note [How far ahead]. Blocks that follow are gathered until the ones ahead have ``numel`` elements
    together, but at least one of them, however large. A block without sharded units, such as a norm, counts
    for nothing: the next one would be gathered exposed behind its short computation.

    Note [Prefetch keeps the order]. A gather is a collective, so all ranks must start the same ones in the
    same order. What is gathered ahead therefore follows from the order of the last pass and from the sizes of
    units, never from the time: a step in the background may still write on one rank what it has written on
    another. With several ranks the host waits for that step here. It would wait at the block's own call, too,
    unless the model calls another block: then a rank that has gathered ahead and one that has not would start
    different collectives, and hang.
    """

    def __init__(self, blocks: Sequence[Block], comm: Comm, *, numel: int, max_live_numel: int) -> None:
        """Gather at least ``numel`` elements ahead (0: none), unless more than ``max_live_numel`` elements of
        sharded units would be unsharded at one time.
        """
        self.live = LiveElements()
        self._blocks = blocks
        self._alone = comm.world_size == 1
        self.numel = numel
        self._max_live_numel = max_live_numel
        self._ahead: dict[int, int] = {}
        """Maps the blocks that follow, as far as their gathers have been started, to the elements of their
        sharded units, in order. It is kept from one block to the next: walking along it again for each block
        would take the host longer than a small block's computation.
        """
        self._ahead_numel = 0
        self._ahead_count = 0
        """Counts those with sharded units."""
        self._enough_blocks = 1
        """Sets how many blocks with sharded units are enough: the last one's kind of memory decides."""
        self._followers: Mapping[int, int] = {}
        """Holds the order that ``_ahead`` follows."""

    def after(self, order: OrderHint, index: int) -> None:
        """Start to gather blocks that come next."""
        if not self.numel:
            return
        self._pass(order, index)
        last = next(reversed(self._ahead), index)
        while not self._is_enough():
            following = order.after(last)
            # The order may lead in a circle, where a block is used several times.
            if following is None or following == index or following in self._ahead:
                break
            units = [unit for unit in self._units(following) if unit.shard_params]
            if not self._start([unit for unit in units if unit.state is UnitState.SHARDED]):
                break
            numel = sum(unit.numel for unit in units)
            self._ahead[following] = numel
            self._ahead_numel += numel
            if units:
                self._ahead_count += 1
                self._enough_blocks = max(unit.values.blocks_ahead for unit in units)
            last = following
        first = next((block for block, numel in self._ahead.items() if numel), None)
        if first is not None:
            for unit in self._units(first):
                unit.make_room()

    def is_ahead(self, block: int) -> bool:
        """Tell whether a block is gathered ahead of its use."""
        return block in self._ahead

    def used_first(self, order: OrderHint) -> list[Unit]:
        """Return the sharded units of the block that a pass begins with, and of those that are gathered ahead
        while it computes; none without gathers ahead.
        """
        units: list[Unit] = []
        ahead = 0
        total = 0
        seen: set[int] = set()
        block = order.first
        while ahead < self.numel and block is not None and block not in seen:
            own = [unit for unit in self._units(block) if unit.shard_params]
            size = sum(unit.numel for unit in own)
            total += size
            if total > self._max_live_numel:
                break
            units += own
            ahead += size if seen else 0  # the first block is not ahead of another
            seen.add(block)
            block = order.after(block)
        return units

    def _pass(self, order: OrderHint, index: int) -> None:
        """Note that ``index`` is used now: it is ahead no more, or the order was another one."""
        if order.followers is self._followers and next(iter(self._ahead), None) == index:
            numel = self._ahead.pop(index)
            self._ahead_numel -= numel
            self._ahead_count -= numel > 0
            first = next((block for block, numel in self._ahead.items() if numel), None)
            units = [] if first is None else self._units(first)
            # The end of a GatheredParameters context inside the pass reshards what was ahead.
            if not any(unit.state is UnitState.SHARDED for unit in units):
                return
        self._followers = order.followers
        self._ahead.clear()
        self._ahead_numel = 0
        self._ahead_count = 0

    def _units(self, block: int) -> list[Unit]:
        """Return the units of a block in an ``OrderHint``."""
        return self._blocks[~block if block < 0 else block].units

    def _is_enough(self) -> bool:
        """Tell whether enough is ahead: see Note [How far ahead]."""
        return self._ahead_numel >= self.numel and self._ahead_count >= self._enough_blocks

    def _start(self, units: Sequence[Unit]) -> bool:
        """Start to gather sharded units of a block; return False where one cannot be gathered now."""
        if not units or (self._alone and all(unit.values.is_gathered_directly for unit in units)):
            return True  # a local copy: starting it early gains nothing
        if self.live.numel + sum(unit.numel for unit in units) > self._max_live_numel:
            return False
        with outside_transforms():
            for unit in units:
                # A rank alone need not wait here: see Note [Prefetch keeps the order].
                if unit.updated.refuses or (self._alone and not unit.updated.ready):
                    return False
                unit.unshard(rounded=True)
        return True


# -- loss scaling -----------------------------------------------------------------------------------
#
# Puts the loss scale into a backward pass, at whichever tensor that begins.


class LossScaling:
    """Multiplies gradients by the loss scale where a backward pass enters the model, unless the loss has been
    multiplied already.

    Attributes
        factor: returns the loss scale; None where losses are not scaled. Set by ``Engine``.
        micro_share: a micro-batch's part of a step, for a backward pass that the caller starts.
        loss_is_scaled: the backward pass that is under way, or comes next, starts at a loss multiplied
            already. Set by :meth:`expect_scaled`.
        tokens: the number of tokens of its loss; None where losses are not weighted. Without tokens, the
            gradients of the model's outputs are zero, also where the script's mean (0 / 0) makes NaN of them.
            Not those of parameters: an expert has gradients of other ranks' tokens.
    """

    def __init__(self) -> None:
        self.factor: Callable[[], float | Tensor] | None = None
        self.micro_share: Callable[[], float] = lambda: 1.0
        self.tokens: int | Tensor | None = None
        self.loss_is_scaled = False
        self._at_outputs = False
        self._has_begun = False

    def expect_scaled(self, tokens: int | Tensor | None) -> None:
        """Note that the next backward pass starts at a loss multiplied already, a mean over ``tokens``."""
        self.loss_is_scaled = True
        self.tokens = tokens
        self._has_begun = False

    def begin(self) -> None:
        """Begin a backward pass."""
        if self._has_begun:
            self.end()  # what is noted was for a pass that ended in an exception
        self._has_begun = True

    def end(self) -> None:
        """Forget how the pass began."""
        self.loss_is_scaled = False
        self._at_outputs = False
        self._has_begun = False
        self.tokens = None

    def at_output(self, grad: Tensor) -> Tensor | None:
        """Scale the gradient of one of the model's outputs; return None to leave it unchanged."""
        if self.tokens is not None:
            return zero_without(self.tokens, grad)
        if self.factor is None or self.loss_is_scaled:
            return None
        self._at_outputs = True
        # in fp32: a scale of 65536 is infinite in fp16, and torch would cast a 0-dim tensor to it
        return (grad.to(torch.promote_types(grad.dtype, torch.float32)) * self.factor()).to(grad.dtype)

    def of_parameter(self, grad: Tensor) -> Tensor:
        """Return a parameter's gradient as its part of the step, in a pass that did not begin at a scaled
        loss. Raises RuntimeError where it did not begin at the model's outputs either.
        """
        if self.factor is not None and not self._at_outputs:
            raise RuntimeError(
                "fp16 needs engine.backward(loss), or engine.scale(loss).backward(): this backward pass does "
                "not start at the model's outputs, where zlaunch applies the loss scale"
            )
        share = self.micro_share()
        return grad if share == 1.0 else grad * share


def zero_without(tokens: int | Tensor, grad: Tensor) -> Tensor:
    """Return a gradient, or zeros where its loss has no tokens."""
    if isinstance(tokens, int):
        return grad if tokens else torch.zeros_like(grad)
    return torch.where(tokens > 0, grad, torch.zeros_like(grad))


# -- hooks ------------------------------------------------------------------------------------------


Gathered = Callable[[Iterable[Unit]], AbstractContextManager[None]]
Intercept = Callable[[nn.Module, Gathered], Callable[[], None]]
"""Replaces methods of a module that would fail on sharded parameters; returns a function that restores them.
It is given the context that keeps units unsharded.
"""


def _undisturbed(function: Callable[..., Any]) -> Hook:
    """Return a hook that a compiler does not trace into: hooks move storages."""
    # Traced, this frame of all hooks would be compiled for each of them, up to torch's limit of eight.
    torch._dynamo.decorators.skip(Hook.__call__)
    return Hook(torch._dynamo.disable(function))  # type: ignore[no-untyped-call]


def _at_end(function: Callable[[nn.Module, Any, Any], None]) -> Hook:
    """Return a hook for the end of a forward pass, with or without an error.

    torch calls it after an error with no output, and warns of what it raises. If the error is that a rank has
    exited, the hook meets it too: the warning would be printed before the cause.
    """

    def run(module: nn.Module, args: Any, output: Any) -> None:
        after_error = output is None and sys.exc_info()[0] is not None
        try:
            function(module, args, output)
        except PeerLost:
            if not after_error:
                raise

    return _undisturbed(run)


class _Ending:
    """Calls a function at the end of a backward pass. Only torch's list of callbacks refers to it."""

    __slots__ = ("__weakref__", "_function")

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function

    def __call__(self) -> None:
        self._function()


class ShardedModel:
    """Drives the units of ``module`` through its forward and backward passes.

    Note [When does what happen]
        forward, before a block: its units are unsharded; those that followed it last time are gathered
            ahead.
        forward, after a block: its units are resharded, except the last block's, which the backward pass
            needs at once. The saved tensor stores a position in the unit (``saved_tensors.py``); backward
            gathers the unit to read it. This guarantees correctness. A hook on each output that can be found,
            and on its base if it is a view, starts the gather early. This provides the overlap.
        backward, at a block's output: its units are unsharded, the blocks before it are gathered ahead.
        backward, at a parameter's gradient: it moves into the unit's bucket; the last one reshards the unit
            and reduces.
        backward, at the end: what is incomplete is reduced, everything is resharded. This callback is queued
            from the root's output: queued inside a reentrant checkpoint it would run too early.
    Inside a backward pass (recomputation under activation checkpointing) forward hooks only gather: a
    recomputation may stop before the forward hook that would reshard.

    Note [Parts of a block]
        A block that is too large for one unit is divided (``policy.py``): its parts are blocks inside of a
        block, and the rules above hold for each. One rule is different. If all parts stayed gathered in the
        recomputation of a block, the whole block would be. So a part is resharded after its recomputation,
        and gathered again for its gradient. The part whose gradient the recomputation is for is gathered
        once, in the recomputation (``OrderHint.late``), and stays. torch keeps what a recomputation saves as
        plain tensors; hooks above torch's keep a part's weights as places (``SavedTensors.enter_part``). The
        backward order has recomputations as visits of their own, so that these gathers start early too.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: list[Block],
        reducer: GradientReducer,
        comm: Comm,
        options: ShardingOptions,
        *,
        intercept: Intercept,
        prefetch_numel: int,
        max_live_numel: int,
    ) -> None:
        self.module = module
        self.blocks = blocks
        self.options = options
        self.reducer = reducer
        self.comm = comm
        self.units = [unit for block in blocks for unit in block.units]
        self._prefetch = Prefetch(blocks, comm, numel=prefetch_numel, max_live_numel=max_live_numel)
        self._root = blocks[0]
        self._block_of = {id(unit): block for block in blocks for unit in block.units}
        self._pass = Pass(one_thread=options.shard_params)
        comm.current_pass_id = self._pass.current_id
        self._due: set[int] = set()
        """Holds the blocks whose outputs have had gradients in this backward pass."""
        self._passed: list[Block] = []
        """Lists blocks with frozen units whose backward has begun; see _reshard_passed."""
        self._forward_order = OrderHint()
        self._backward_order = OrderHint()
        self.loss_scaling = LossScaling()
        self._saved = SavedTensors(self._on_saved)
        self._saved.watch(self.units)
        self._unhooked = False
        """Tells that a forward pass ran without hooks on saved tensors: units stay until its backward pass
        has ended, or the next forward pass begins.
        """
        self._ending: Callable[[], _Ending | None] = lambda: None
        """Returns what torch calls at the end of the backward pass; None once torch has dropped it, which it
        does uncalled after an exception.
        """
        self._kept = ExitStack()
        """Holds units of which the root's output is a parameter."""
        self.before_forward: Callable[[], None] | None = None
        """Called before each forward pass of the whole model, outside of any backward pass."""
        self.replace_gradient: Callable[[Tensor, Tensor], Tensor] | None = None
        """Returns what is reduced in place of a parameter's gradient; the hooks of scripts come before it."""
        self._handles: list[Any] = []
        self._gradient_handles: dict[int, list[Any]] = {}
        self.engine: Any = None
        """Keeps the engine that drives this object. The module's hooks keep both alive as long as the module
        lives: an engine that only the cycle collector would end ends at another time on each rank.
        """
        self._install()
        self._restore = intercept(module, self.gathered)

    # -- installation

    def _install(self) -> None:
        sharded = any(unit.shard_params for unit in self.units)
        add = self._handles.append
        # Before the script's hooks, which may read parameters; and always_call, because an error in the
        # forward pass must not leave units gathered.
        add(self.module.register_forward_pre_hook(_undisturbed(self._before_root), prepend=True))
        add(self.module.register_forward_hook(_at_end(self._after_root), always_call=True))
        divided = {id(block.around) for block in self.blocks}
        for block in self.blocks:
            idle = not self.options.shard_optimizer and all(unit.trainable for unit in block.units)
            # nothing to gather, no parameter that could be unfrozen
            if idle or not (block.units or id(block) in divided):
                continue
            for module in block.modules:
                if module is self.module:
                    continue
                add(module.register_forward_pre_hook(_undisturbed(self._before(block)), prepend=True))
                if sharded:
                    hook = _at_end(self._after(block))
                    add(module.register_forward_hook(hook, always_call=True))
        for unit in self.units:
            self._attach(unit)

    def _attach(self, unit: Unit) -> None:
        if unit.shard_params:
            self._prefetch.live.watch(unit)
            unit.on_demand = self._on_demand
            unit.is_needed = self._is_needed
        if unit.trainable:
            handles = self._gradient_handles[id(unit)] = []
            for index, parameter in enumerate(unit.parameters):
                if unit.has_empty_placeholders:
                    handles.append(parameter.register_hook(self._before_gradient(unit, index)))  # type: ignore[no-untyped-call]
                hook = self._on_gradient(unit, index)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def replace_units(self, block: Block, units: list[Unit]) -> None:
        """Replace a block's units by others, made of its parameters; the former ones have released them."""
        for old in block.units:
            if all(old is not new for new in units):
                for handle in self._gradient_handles.pop(id(old), []):
                    handle.remove()
                self._prefetch.live.leave(old)
                del self._block_of[id(old)]
        for new in units:
            if id(new) not in self._block_of:
                self._block_of[id(new)] = block
                self._attach(new)
        block.units = units
        # in place: others hold the list
        self.units[:] = [unit for each in self.blocks for unit in each.units]
        self._saved.watch(self.units)

    def close(self) -> None:
        """Turn the module back into a plain one, with present values. Collective if parameters are sharded.

        Raises the first DiskError; parameters whose values cannot be read are left as NaN.
        """
        for handle in [*self._handles, *(h for own in self._gradient_handles.values() for h in own)]:
            handle.remove()
        self._kept.close()
        self._saved.reset()
        self._restore()
        first: DiskError | None = None
        for unit in self.units:
            try:
                unit.detach()
            except DiskError as error:
                first = first or error
                unit.abandon()
        if first is not None:
            raise first

    # -- forward

    def _before_root(self, module: nn.Module, args: Any) -> None:
        if placeholder.in_backward():
            self._enter(module)
            self._unshard(self._root)
            return
        if self._pass.is_backward:
            self._reset_backward()  # the last one ended in an exception
            self.loss_scaling.end()
        if self._pass.was_cut_off():
            self.abandon_forward()
        if not self._pass.depth:
            self._kept.close()
            if self._unhooked:
                self._unhooked = False
                self.reshard_all()
            if self.before_forward is not None:
                self.before_forward()
        self._pass.begin(sys._getframe())
        self._enter(module)
        self._unshard(self._root)

    def _enter(self, module: nn.Module) -> None:
        if not self._saved.enter(module):
            self._unhooked = True

    def abandon_forward(self) -> None:
        """Reset the pass after an exception; for some (KeyboardInterrupt) torch calls no hooks."""
        self._pass.reset()
        self._saved.reset()

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        self._saved.leave(module)
        if placeholder.in_backward():
            return
        self._pass.end()
        if self._pass.depth:
            return
        armed = arm(output, self._begin_backward, self._at_output)
        self._forward_order.end()
        if not self.options.shard_params:
            return
        for tensor in tensors_in(output):
            unit = owner_of(tensor)
            if unit is not None and unit.shard_params:
                self._kept.enter_context(unit.hold())
        # where the output does not tell, gradients may come nevertheless
        expected = armed or torch.is_grad_enabled()
        self._reshard_after_forward(
            *(
                block
                for block in self.blocks
                if not expected or not (block.is_root or self._is_used_next(block))
            )
        )

    def _is_used_next(self, block: Block) -> bool:
        """Tell whether the backward pass needs a block at once when the forward pass has ended."""
        return self._forward_order.is_last(block.index) and block.index not in self._backward_order.late

    def _reshard_after_forward(self, *blocks: Block) -> None:
        if not self._unhooked:
            self._reshard(*blocks)

    def _before(self, block: Block) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if not self._pass.depth and self.before_forward is not None and not placeholder.in_backward():
                self.before_forward()
            recomputes = placeholder.in_backward()
            self._enter(module)
            if block.around is not None and not self._saved.enter_part(module):
                self._unhooked = True
            self._unshard(block)
            if block.is_root or not self.options.shard_params:
                return
            if not recomputes:
                self._forward_order.visit(block.index)
                self._prefetch.after(self._forward_order, block.index)
            elif block.around is not None:
                self._backward_order.visit(~block.index, is_late=block.index in self._due)
                self._prefetch.after(self._backward_order, ~block.index)

        return before

    def _after(self, block: Block) -> Callable[..., None]:
        def at_gradient() -> None:
            self._begin_backward()
            self._reshard_passed(block)
            self._due.add(block.index)
            if block.index not in self._backward_order.late:
                self._unshard(block)
                self._backward_order.visit(block.index)
                self._prefetch.after(self._backward_order, block.index)
            if not any(unit.trainable for unit in block.units):
                self._passed.append(block)  # no gradient will tell that it is used no more

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if block.around is not None:
                self._saved.leave_part(module)
            self._saved.leave(module)
            if placeholder.in_backward():
                needed = block.index in self._due or self._prefetch.is_ahead(block.index)
                if block.around is not None and not needed:
                    self._reshard_after_forward(block)
                return
            if block.is_root:
                return
            armed = arm(output, at_gradient)
            if not (armed and self._pass.depth and self._is_used_next(block)):
                self._reshard_after_forward(block)

        return after

    def _at_output(self, grad: Tensor) -> Tensor | None:
        """Begin the backward pass at an output of the root; scale the gradient unless the loss was."""
        self._begin_backward()
        return self.loss_scaling.at_output(grad)

    # -- backward

    def _begin_backward(self) -> None:
        if self._pass.is_backward:
            if self._ending() is not None:
                return
            self._reset_backward()  # the last one ended in an exception, and its graph is used once more
        self._pass.begin_backward()
        self.loss_scaling.begin()
        self.reducer.begin()
        if not self._pass.depth:
            self._forward_order.end()
        ending = _Ending(self._end_backward)
        self._ending = weakref.ref(ending)
        torch.autograd.Variable._execution_engine.queue_callback(ending)
        self._unshard(self._root)

    @staticmethod
    def _before_gradient(unit: Unit, index: int) -> Callable[[Tensor], None]:
        its_unit = weakref.ref(unit)

        def before_gradient(grad: Tensor) -> None:
            own = its_unit()
            if own is not None:
                own.await_gradient(index)

        return before_gradient

    def _on_gradient(self, unit: Unit, index: int) -> Callable[[Tensor], None]:
        # weak: torch keeps such a hook where the collector of cycles does not see it
        model = weakref.ref(self)
        its_unit = weakref.ref(unit)

        def on_gradient(parameter: Tensor) -> None:
            alive = model()
            own = its_unit()
            if alive is not None and own is not None:
                alive._take_gradient(own, index, parameter)

        return on_gradient

    def _take_gradient(self, unit: Unit, index: int, parameter: Tensor) -> None:
        self._begin_backward()
        grad = placeholder.GRAD.__get__(parameter)
        if grad is None:
            return
        # The engine has the gradient now. Left here, autograd would add the next one to it, and its memory
        # would stay.
        placeholder.GRAD.__set__(parameter, None)
        if unit.has_empty_placeholders:
            unit.gradient_taken(index)
        if grad.is_sparse:
            grad = grad.to_dense()
        if grad.shape != unit.shapes[index]:
            raise RuntimeError(
                f"the gradient of {unit.names[index]} has shape {tuple(grad.shape)}, but the parameter has "
                f"{tuple(unit.shapes[index])}: in a custom autograd.Function, read the shape of a sharded "
                "parameter inside `with zlaunch.zero.GatheredParameters([parameter]):`, both in forward and "
                "in backward"
            )
        if not self.loss_scaling.loss_is_scaled:
            grad = self.loss_scaling.of_parameter(grad)
        if self.replace_gradient is not None:
            grad = self.replace_gradient(parameter, grad)
        complete = self.reducer.add(unit, index, grad)
        if not complete or not unit.shard_params:
            return
        block = self._block_of[id(unit)]
        if not block.is_root:
            if any(not other.trainable for other in block.units):
                self._passed.append(block)
            else:
                unit.reshard()

    def _on_saved(self) -> None:
        """Begin the backward pass when a saved tensor of a unit is about to be used."""
        if placeholder.in_backward():
            self._begin_backward()

    def _reshard_passed(self, current: Block) -> None:
        """Reshard blocks with frozen parameters once an earlier block's output has its gradient.

        A gradient may still have to pass through a frozen weight after the last trainable one has its
        gradient, so such a unit cannot be resharded when it is complete.
        """
        if self._passed:
            # A part and the block around it often have the same output tensor.
            begun = [block for block in self._passed if block.contains(current) or current.contains(block)]
            self._reshard(*(block for block in self._passed if block not in begun))
            self._passed = begun

    def _end_backward(self) -> None:
        if self._pass.depth and self.reducer.is_empty_pass:  # autograd.grad inside the forward pass
            self._pass.end_backward()
            return
        self.reducer.finish()
        self._reset_backward()
        self.loss_scaling.end()

    def _reset_backward(self) -> None:
        self._pass.end_backward()
        self._kept.close()
        self._backward_order.end()
        if not self._pass.depth:
            self._saved.reset()  # an interrupted recomputation has left its hooks
        self._due.clear()
        self._passed.clear()
        self._unhooked = False
        self._reshard(*self.blocks)

    # -- gathering

    def _unshard(self, block: Block) -> None:
        with outside_transforms():
            # All gathers first, then the waits: they overlap.
            for unit in block.units:
                if unit.state is UnitState.SHARDED:
                    unit.unshard(rounded=True)
            for unit in block.units:
                if unit.state is not UnitState.UNSHARDED:
                    unit.wait_unsharded(rounded=True)

    def _reshard(self, *blocks: Block) -> None:
        with outside_transforms():
            for block in blocks:
                for unit in block.units:
                    if unit.state is not UnitState.SHARDED and unit.shard_params:
                        unit.reshard()

    def _on_demand(self, unit: Unit) -> bool:
        """Gather a sharded parameter that no module hook announced, if inside a pass.

        Its unit joins the root block and stays unsharded until the pass ends, because the runtime cannot know
        when backward needs it. The unit of a part joins the block around it.
        """
        assert isinstance(unit, Unit)
        if not self._pass.depth and not placeholder.in_backward():
            return False
        if placeholder.in_backward():
            self._begin_backward()
        block = self._block_of[id(unit)]
        if not block.is_root:
            joined = block.around or self._root
            block.units.remove(unit)
            joined.units.append(unit)
            self._block_of[id(unit)] = joined
        with outside_transforms():
            unit.wait_unsharded(rounded=True)
        return True

    def _is_needed(self, unit: Unit) -> bool:
        """Return whether a pass still needs a unit when its last ``GatheredParameters`` context ends: a graph
        without saved-tensor hooks uses it, or its gradients are pending.

        Then the end of the backward pass, or the next forward pass, reshards it.
        """
        due = self._pass.is_backward and unit.trainable and self.reducer.awaits(unit)
        return self._unhooked or due

    def used_first(self) -> list[Unit]:
        """Return the units whose gathers come first after a step: trained ones that stay whole (at stage 3
        all of them, because they are small), and what the next forward pass is likely to begin with.
        """
        whole: list[Unit] = []
        numel = 0
        for unit in self.units:
            few = self.options.shard_params or numel < self._prefetch.numel
            if unit.trainable and not unit.shard_params and few:
                whole.append(unit)
                numel += unit.numel
        root = [unit for unit in self._root.units if unit.shard_params]
        ahead = self._prefetch.used_first(self._forward_order)
        # Another engine may run next, and would lack the memory.
        alone = len(open_comms) == 1
        return list(dict.fromkeys([*whole, *(root + ahead if alone else [])]))

    def reshard_all(self) -> None:
        """Reshard every unit that may be, and release what is prepared for the next gathers."""
        if self._pass.was_cut_off():
            self.abandon_forward()
        self._kept.close()
        self._unhooked = False
        self._reshard(*self.blocks)
        for unit in self.units:
            unit.forget_gather()

    @property
    def is_in_pass(self) -> bool:
        """Tell whether a forward or backward pass is going on, or one has ended in an exception and left
        gradients in flight.
        """
        calling = bool(self._pass.depth) and not self._pass.was_cut_off()
        return placeholder.in_backward() or calling or self.reducer.is_busy

    @contextmanager
    def gathered(self, units: Iterable[Unit]) -> Iterator[None]:
        """Keep ``units`` unsharded inside the context. Collective; ranks must enter alike."""
        with ExitStack() as stack:
            for unit in units:
                stack.enter_context(unit.hold())
            yield
