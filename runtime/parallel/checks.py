"""Keeps what ranks that share layers must have in common: the batch, the random numbers of dropout, and what
the model makes of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..comm.axis import Axis, Channel
from ..comm.shard_spec import spec_of
from ..errors import ParameterError, RankMismatchError
from ..fingerprint import CHUNK, FACTOR, SEED, fingerprint
from ..zero import placeholder
from ..zero import unit as external_writes
from ..zero.tensors import tensors_in
from ..zero.unit import Unit, owner_of
from .forwards import SharedForward
from .tensor_axis import CHECK, TensorAxis
from .uses import ActivationUses, ReplicatedUses, ShardUses
from .vocabulary_loss import VocabularyLoss

# -- lone uses --------------------------------------------------------------------------------------
#
# Looks at the operations of a pass: notices those that compute with this rank's shard of a parameter or
# activation as if it were the full one, and replicated parameters that meet shards.


_VALUES = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__array__")
"""Names what makes something other than a tensor of values."""
_HARMLESS = ("grad", "_grad", "_base", "grad_fn")
"""Names attributes that give another tensor, or none, which has no value of this one."""
_OF_PARAMETERS = (placeholder.__name__, external_writes.__name__)
"""Names the modules with attributes that parameters of the runtime have for whoever asks."""


class LoneUses(TorchFunctionMode):
    """Raises ParameterError where an operation uses a sharded parameter outside of the modules that know it,
    or computes along a dimension of which each rank has a shard. ``replicated`` follows the other parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        sharded: Mapping[int, str],
        forwards: Mapping[str, Any],
        replicated: ReplicatedUses,
    ) -> None:
        """``sharded`` names parameters by their ids; those whose modules, or modules around them, have
        ``forwards`` of their own are watched.
        """
        super().__init__()
        self.activations = ActivationUses(ShardUses(), replicated)
        self._names: dict[int, str] = {}
        self._modules: dict[int, list[nn.Module]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            around = [own for own in forwards if name == own or name.startswith(f"{own}.")]
            for parameter in module._parameters.values():
                if parameter is not None and id(parameter) in sharded and around:
                    self._names[id(parameter)] = sharded[id(parameter)]
                    found = self._modules.setdefault(id(parameter), [])
                    found += [model.get_submodule(own) for own in around]

    def __deepcopy__(self, memo: Any) -> LoneUses:
        return self  # a copy of a model is looked at in the same way

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function. Raises ParameterError for a use that the rest of a parameter would be missed in."""
        name = _name_of(func)
        shards, replicated = self.activations
        shard = shards.before(name, args, kwargs or {})
        found = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs or {})):
            if id(each) in self._names and _reads(func, found, each) and not self._knows(id(each)):
                raise ParameterError(
                    f"tensor parallelism: {name} uses {self._names[id(each)]}, which is sharded, outside "
                    "its own module: remove the module from tensor_parallel.plan"
                )
        if shard is not None:
            shards.after(name, shard, found)
        if name not in _HARMLESS:
            replicated.after(name, args, kwargs or {}, found, looks=not _is_of_runtime())
        return found

    def _knows(self, identity: int) -> bool:
        """Tell whether the present call is the runtime's, or inside of a module that computes with shards."""
        frame = sys._getframe(2)
        is_first = True
        while frame is not None:
            place = frame.f_globals.get("__name__", "")
            if is_first and not place.startswith("torch") and place not in _OF_PARAMETERS:
                if place.startswith("zlaunch."):
                    return True
                is_first = False
            own = frame.f_locals.get("self")
            if isinstance(own, SharedForward) and any(own.module is m for m in self._modules[identity]):
                return True
            frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
        return False


def _is_of_runtime() -> bool:
    """Tell whether the runtime itself calls the operation that is looked at: it knows what it sums."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torch"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("zlaunch.")


def _reads(func: Any, found: Any, parameter: Tensor) -> bool:
    name = _name_of(func)
    if name in _HARMLESS:
        return False
    return name in _VALUES or any(isinstance(t, Tensor) and t is not parameter for t in tree_leaves(found))


def _name_of(func: Any) -> str:
    name = getattr(func, "__name__", str(func))
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else name


# -- replicated values ------------------------------------------------------------------------------
#
# Checks that replicated parameters stay equal in a tensor-parallel group.


_FIRST = 3
_TOLERANCE = 1e-3
"""Is far above what GPUs that round differently do, and far below what another gradient does."""


class ReplicatedValues:
    """Compares replicated parameters after the first steps, and then after four times as many: a replicated
    parameter that a model uses on shards of activations has another gradient on each rank.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self._passes = 0
        self._next = _FIRST

    def check(self, model: nn.Module) -> None:
        """Raise RankMismatchError, naming the first parameter that differs. Collective in some passes."""
        self._passes += 1
        if self._passes < self._next:
            return
        self._next *= 4
        names = []
        sums = []
        with torch.no_grad():
            for name, values in _replicated(model):
                wide = values.detach().double()
                names.append(name)
                sums.append(torch.stack([wide.sum(), wide.abs().sum()]))
        if not sums:
            return
        mine = torch.stack(sums).to(self._axis.comm.device)
        both = self._axis.max(torch.cat([mine, -mine]), CHECK)
        highest = both[: len(names)]
        lowest = -both[len(names) :]
        differs = (highest - lowest).abs()[:, 0] > _TOLERANCE * highest[:, 1]
        for name, is_other in zip(names, differs.tolist(), strict=True):
            if is_other:
                raise RankMismatchError(
                    f"{name} is replicated in the tensor-parallel group but now differs between its ranks. "
                    "Possible causes: the model uses it with sharded activations (set its style to "
                    "replicated_with_grad_allreduce in tensor_parallel.plan); ranks draw different random "
                    "numbers (set draws_random_numbers = True on the module that draws them); only one "
                    "rank loaded or wrote values"
                )


def _replicated(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the trained parameters that are replicated, or a sharded unit's shard of them, by name; not what
    is offloaded, which a step in the background may still write.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        spec = spec_of(parameter)
        unit = owner_of(parameter)
        is_replicated = spec is None or len(set(spec.boxes)) == 1
        if not is_replicated or not isinstance(unit, Unit) or not parameter.requires_grad:
            continue
        if unit.offloaded_states:
            continue
        if not unit.shard_params:
            found[id(parameter)] = name, parameter
        elif unit.values.tensor is not None and unit.values.tensor.device == unit.device:
            unit.values.flush()
            found.setdefault(id(unit), (name, unit.values.tensor))
    return list(found.values())


# -- same batch -------------------------------------------------------------------------------------
#
# Checks that ranks which share a batch were given the same one, or made the same of it.
#
# Note [Same batches]
#     Each pass takes a fingerprint of its inputs, a sum over all their bits, where they are. In the first
#     passes ranks compare it before they compute, so that a wrong script fails early. Every pass adds it to
#     a
#     number of all passes so far, which travels in the all-reduce that an optimizer step makes anyway. So
#     no
#     later pass waits, and no step is made with a batch that differed. A sum over all ranks of the world
#     tells
#     whether the ranks of each group have equal numbers: each multiplies its own by a coefficient, and the
#     coefficients of a group add up to zero.


_FIRST_BATCHES = 10
_ROWS = 8
_SAME = 1e-12
"""CPUs of several kinds round the sums of equal integers differently."""
COMPUTED = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Limits by dtype how far apart, as a part of the norm, values may be that ranks have computed alike: sums
without a fixed order round differently. Other weights make far larger differences."""
COMPUTED_HALF = 3e-2

_WORDS = 3
_WORD_BITS = 20
"""Divide a number into parts whose products with coefficients of as many bits float64 sums exactly."""


def both_ways(number: Tensor) -> Tensor:
    """Return a fingerprint and its complement, for :func:`differ` after the larger ones were taken."""
    return torch.stack([number, ~number])


def differ(largest: Tensor) -> Tensor:
    """Tell whether fingerprints differ, 0-dim bool, by the largest :func:`both_ways` of the ranks."""
    return largest[0] != ~largest[1]


class SameBatch:
    """Compares the batches of the ranks of an axis: see Note [Same batches]."""

    mark_count = _WORDS
    """Counts the numbers of :meth:`marks`."""

    def __init__(self, axis: Axis, channel: Channel, complaint: str, *, every_pass: bool) -> None:
        """The ranks of ``axis`` share a batch, and compare it in ``channel``; ``complaint`` is what the error
        says. ``every_pass``: all passes are compared at once, where parameters change before the step.
        """
        self.ranks = tuple(axis.ranks)
        self.complaint = complaint
        self._axis = axis
        self._channel = channel
        self._device = axis.comm.device
        self._every_pass = every_pass
        self._passes = 0
        self._all = torch.zeros((), dtype=torch.int64, device=self._device)
        """Is a number of all passes so far."""
        generator = torch.Generator().manual_seed(SEED)
        others = torch.randint(1, 1 << _WORD_BITS, (axis.size - 1, _WORDS), generator=generator)
        own = torch.cat([-others.sum(0, keepdim=True), others])[axis.rank]
        self._coefficients = own.to(self._device, torch.float64)
        axis.comm.batches.append(self)

    def __deepcopy__(self, memo: Any) -> SameBatch:
        return self  # the ranks call a copy of a model with one batch, too

    def check(self, inputs: Any, *, always: bool = False) -> None:
        """Take the tensors in ``inputs``. Raises RankMismatchError in the first passes, and with ``always``,
        if the ranks have different ones; later the step does.
        """
        found = fingerprint(inputs, self._device)
        if always or self._every_pass or self._passes < _FIRST_BATCHES:
            self._compare(found)
        if not always:
            self._all = self._all * FACTOR + found
            self._passes += 1

    def _compare(self, found: Tensor) -> None:
        if bool(differ(self._axis.max(both_ways(found), self._channel))):
            raise RankMismatchError(self.complaint)

    def marks(self) -> Tensor:
        """Return numbers whose sums over all ranks are zero if the passes of each group were equal."""
        mask = (1 << _WORD_BITS) - 1
        words = torch.stack([self._all >> (at * _WORD_BITS) & mask for at in range(_WORDS)])
        return words.double() * self._coefficients

    def seen(self) -> int:
        """Return a number of all passes so far."""
        return int(self._all)

    def forget(self) -> None:
        """Begin again, after an error on all ranks."""
        self._all = torch.zeros_like(self._all)


class SameValues:
    """Compares what the ranks of an axis have computed in the first passes, which may be rounded. Collective.

    Compared are projections of each tensor on two fixed vectors, its norm and its shape.
    """

    def __init__(self, axis: Axis, channel: Channel, complaint: str, *, first: int) -> None:
        """The ranks of ``axis`` compare values in ``channel`` in the ``first`` passes; ``complaint`` is what
        the error says.
        """
        self._axis = axis
        self._channel = channel
        self._device = axis.comm.device
        self._complaint = complaint
        self._first = first
        self._passes = 0

    def check(self, values: Any) -> None:
        """Raise RankMismatchError if the ranks have different tensors in ``values``."""
        if self._passes < self._first:
            self._compare(tensors_in(values))
        self._passes += 1

    def _compare(self, tensors: Iterable[Tensor]) -> None:
        sums = torch.zeros(_ROWS, 4, dtype=torch.float64, device=self._device)
        for index, tensor in enumerate(tensors):
            sums[min(index, _ROWS - 1)] += self._summary(tensor, index)
        both = self._axis.max(torch.cat([sums, -sums]), self._channel)
        spread = both[:_ROWS] + both[_ROWS:]
        limits = both[:_ROWS, 2].sqrt()
        differs = (spread[:, :2] > limits.unsqueeze(1)).any() | (spread[:, 3] > 0).any()
        if bool(differs):
            raise RankMismatchError(self._complaint)

    def _summary(self, tensor: Tensor, index: int) -> Tensor:
        """Return two projections, the square of how far they may be apart, and a number of the shape."""
        rounding = COMPUTED.get(tensor.dtype, COMPUTED_HALF) if tensor.is_floating_point() else _SAME
        flat = tensor.detach().reshape(-1)
        flat = flat.real if flat.is_complex() else flat
        shape = float(sum((place + 2) * size for place, size in enumerate(tensor.shape)) + index)
        found = torch.zeros(4, dtype=torch.float64, device=self._device)
        found[3].fill_(shape)
        for begin in range(0, flat.numel(), CHUNK):  # logits are large
            wide = flat[begin : begin + CHUNK].to(self._device, torch.float64).nan_to_num(1.0, 2.0, 3.0)
            places = torch.arange(begin, begin + wide.numel(), device=wide.device)
            mixed = (places * 2654435761 + 40503) >> 7  # Knuth's multiplicative hashing
            for column, bits in enumerate((mixed & 1023, (mixed >> 10) & 1023)):
                found[column] += (wide * (bits.double() / 512 - 1 + 1 / 4096)).sum()
            found[2] += wide.square().sum() * rounding**2
        return found


# -- agreement --------------------------------------------------------------------------------------


class Agreement:
    """Checks, before a forward pass of the model, that the ranks of an axis have one batch, and gives those
    of a model with dropout the random state of the first of them. A hook; on a copy of the model as well.
    """

    def __init__(
        self, axis: TensorAxis, has_dropout: bool, uses: LoneUses, *, steps_in_backward: bool
    ) -> None:
        """``uses`` is in force in the first passes, until SameOutputs leaves it."""
        self._axis = axis
        self._has_dropout = has_dropout
        self._uses = uses
        self._passes = 0
        self._values = ReplicatedValues(axis)
        ranks = f"{axis.ranks[0]} to {axis.ranks[-1]}"
        self._batch = SameBatch(
            axis,
            CHECK,
            f"ranks {ranks} are one tensor-parallel group but got different batches. Iterate over "
            "engine.dataloader(loader), or use a DistributedSampler with "
            "num_replicas=engine.data_parallel_size and rank=engine.data_parallel_rank; before "
            "generate(do_sample=True), set the same torch.manual_seed on each rank",
            every_pass=steps_in_backward,
        )

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Raise RankMismatchError if the ranks have different batches, or replicated parameters.

        Batches of passes that train are checked here or at the step; at once those in evaluation or without
        gradients, which one rank may make alone, or with words that each rank has drawn for itself.
        """
        is_alone = not (module.training and torch.is_grad_enabled())
        self._batch.check((args, kwargs), always=is_alone)
        if not is_alone:
            self._values.check(module)
        if self._axis.shard_rng is not None:
            self._axis.shard_rng.close()  # a call of a layer by itself may have begun with them
        if self._has_dropout and module.training:
            self._share_random_state()
        is_first = self._passes < _FIRST and self._axis.watched is None  # not inside of another's pass
        if not is_alone and is_first and getattr(module, "_compiled_call_impl", None) is None:
            self._passes += 1
            self._uses.__enter__()  # type: ignore[no-untyped-call]  # torch's own is untyped
            self._axis.watched = self._uses.activations
            self._axis.follow = self._uses.activations.replicated.follow

    def _share_random_state(self) -> None:
        """Take the random state of the axis's first rank, of the CPU's generator and the device's."""
        axis = self._axis
        device = self._axis.comm.device
        held: list[Any] = [torch.get_rng_state()]
        if device.type == "cuda":
            held.append(torch.cuda.get_rng_state(device))
        dist.broadcast_object_list(held, src=axis.ranks[0], group=axis.group)
        if axis.rank:
            torch.set_rng_state(held[0])
            if device.type == "cuda":
                torch.cuda.set_rng_state(held[1], device)


class SameOutputs:
    """Checks, after the first forward passes of the model, that the ranks of an axis have made the same of
    one batch, and lets go of what the axis keeps during a pass. A hook.
    """

    def __init__(self, axis: TensorAxis, uses: LoneUses, loss: VocabularyLoss | None) -> None:
        """``uses`` is left if :class:`Agreement` has put it in force. ``loss`` takes this rank's shard of the
        logits.
        """
        self._axis = axis
        self._uses = uses
        self._loss = loss
        ranks = f"{axis.ranks[0]} to {axis.ranks[-1]}"
        self._outputs = SameValues(
            axis,
            CHECK,
            f"the model's outputs differ on ranks {ranks}, a tensor-parallel group with one batch. Possible "
            "causes: an operation uses a sharded weight outside its module, such as F.linear(x, "
            "module.weight): remove it from tensor_parallel.plan. A layer passes its shard to an operation "
            "that needs the whole activation: follow colwise with rowwise, or use colwise_gather_output. "
            "Ranks draw different random numbers in the model: set draws_random_numbers = True on the "
            "module that draws them",
            first=_FIRST,
        )

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Raise RankMismatchError if the ranks have different outputs, in the first passes of a training."""
        self._axis.last_copy = None
        self._axis.column_input = None
        if self._axis.watched is not None:
            self._uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own is untyped
            self._axis.watched.clear()
            self._axis.watched = None
            self._axis.follow = None
        if self._axis.shard_rng is not None:
            self._axis.shard_rng.close()
        is_due = self._loss is not None and self._loss.end()
        if output is not None and is_due:
            raise ParameterError(
                "tensor_parallel.vocab_parallel_loss: in training, each rank has the logits of other words, "
                "and the model has computed no loss from them: give it labels, or remove the key (a label "
                "smoother, compute_loss_func and other losses outside of the model take the logits)"
            )
        if output is not None and module.training and torch.is_grad_enabled():
            self._outputs.check(list(self._replicated(output)))

    def _replicated(self, output: Any) -> Iterator[Tensor]:
        """Yield the tensors of an output that are replicated."""
        if isinstance(output, Mapping):  # of Hugging Face; each rank has its own heads'
            output = [
                value
                for key, value in output.items()
                if "attentions" not in str(key) and "past_key_values" not in str(key)
            ]
        for tensor in tensors_in(output):
            if tensor.dim() == 0 or self._loss is None:
                yield tensor


def uses_dropout(model: nn.Module) -> bool:
    """Tell whether a model has dropout: a module with a probability, a config that names one, or a module
    that says ``draws_random_numbers``.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if getattr(module, "draws_random_numbers", False):
            return True
    config = getattr(model, "config", None)
    values = vars(config).items() if config is not None and hasattr(config, "__dict__") else ()
    return any(("drop" in name) and isinstance(value, (int, float)) and value > 0 for name, value in values)
