"""Measures the memory of a module's activations by a step on fake tensors, which have no memory.

Training does not import this module: torch's tracker of memory takes a second to import.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from ..activation.checkpointing import checkpoint_blocks
from ..activation.tiles import chunk_loss, tile_loss
from ..errors import MemoryPlanError, ParameterError
from ..models import causal_model
from ..precision import dtype_named
from ..zero.tensors import tensors_in
from .activations import AUTOCAST, Activations
from .model import ModelSizes, described

_DTYPES = {
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
T = TypeVar("T")
Shape = tuple[Sequence[int], torch.dtype | None]
"""Is an input's sizes and dtype; None stands for the compute dtype."""
_TOTAL = "Total"
"""Names the sum in the tracker's amounts."""


def computing_in(name: str) -> tuple[torch.dtype, Callable[[], AbstractContextManager[Any]]]:
    """Return the dtype of a model's parameters and what makes the context of its forward pass, by a name of
    ``zlaunch estimate --dtype``.
    """
    if name in AUTOCAST:
        lower = dtype_named(AUTOCAST[name])
        return torch.float32, partial(torch.autocast, "cpu", lower, cache_enabled=False)
    dtype = dtype_named(name)
    assert dtype is not None
    return dtype, nullcontext


def of_module(
    model: ModelSizes,
    sequence: int,
    micro_batch: int,
    dtype: torch.dtype,
    shape: str | None = None,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    *,
    tiled_loss: bool = False,
) -> Activations | None:
    """Measure a module's activations by running it on fake tensors; None where its inputs are not known.

    A language model gets ``input_ids`` and ``labels`` of ``micro_batch`` x ``sequence``. ``shape`` describes
    the input of any other, such as ``8,3,224,224`` or ``8,128:int64``. ``around`` makes the context of the
    forward pass. With ``tiled_loss``, a Hugging Face causal language model computes its loss in tiles. Raises
    MemoryPlanError if it cannot be run so.
    """
    if model.build is None or not (model.is_language_model or shape):
        return None
    inputs = None if shape is None else parse_shape(shape)
    peak = partial(_peak, model, sequence, micro_batch, dtype, inputs, around, tiled_loss=tiled_loss)
    plain = peak(checkpointed=False)
    assert plain is not None
    less = peak(checkpointed=True)
    return Activations(plain, less, "a pass on fake tensors")


def parse_shape(text: str) -> Shape:
    """Read ``2,128:int64``; no dtype means the compute dtype. Raises MemoryPlanError."""
    sizes, _, name = text.partition(":")
    if not re.fullmatch(r"\d+(,\d+)*", sizes) or (name and name not in _DTYPES):
        raise MemoryPlanError(
            f"--input {text}: expected sizes such as 8,3,224,224, with a dtype if it is not the model's "
            f"({', '.join(_DTYPES)}), such as 8,128:int64"
        )
    return [int(size) for size in sizes.split(",")], _DTYPES.get(name)


def _peak(
    model: ModelSizes,
    sequence: int,
    micro_batch: int,
    dtype: torch.dtype,
    inputs: Shape | None,
    around: Callable[[], AbstractContextManager[Any]],
    *,
    checkpointed: bool,
    tiled_loss: bool,
) -> int | None:
    """Return the largest sum of everything but parameters and buffers in a forward and backward pass, the
    input included.
    """

    def run(module: nn.Module) -> int:
        language_model = causal_model(module)
        chunk_loss(language_model)  # as training does by default
        if tiled_loss:
            tile_loss(language_model, None, "auto")
        for parameter in module.parameters():
            if parameter.requires_grad:  # the runtime takes each gradient when it arrives
                parameter.register_post_accumulate_grad_hook(_drop)  # type: ignore[no-untyped-call]
        given = fake_inputs(sequence, micro_batch, dtype, inputs)
        tracker: Any = _PeakTracker()
        for parameter in module.parameters():
            if not parameter.requires_grad:
                # the tracker hooks every parameter that has no handles yet; torch refuses frozen ones
                none = RemovableHandle(OrderedDict())
                tracker._param_to_grad_hook_handles[parameter] = (none, none)
        tracker.track_external(module)
        with tracker, _Workspaces():  # type: ignore[no-untyped-call]
            with around():
                loss = loss_of(module, given)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's own is untyped
        return sum({id(x): x.nbytes for x in tensors_in(given)}.values()) + sum(
            int(nbytes)
            for of_device in tracker.get_tracker_snapshot("peak").values()
            for kind, nbytes in of_device.items()
            if str(kind).rpartition(".")[2] not in ("PARAM", "BUFFER", _TOTAL)
        )

    return on_fake_tensors(run, model, dtype, inputs, checkpointed=checkpointed)


def on_fake_tensors(
    run: Callable[[nn.Module], T],
    model: ModelSizes,
    dtype: torch.dtype,
    inputs: Shape | None,
    *,
    checkpointed: bool,
) -> T | None:
    """Return ``run`` of a model whose tensors are fake and of a dtype, as all that it makes; None where the
    model has no blocks to be checkpointed. Raises MemoryPlanError.
    """
    before = torch.get_default_dtype()
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    first = None
    torch.set_default_dtype(dtype)
    log.setLevel(logging.CRITICAL)  # it writes a traceback of what is raised here
    try:
        for build in (_built_on_meta, _built):
            try:
                with warnings.catch_warnings(), _whole_sequences(), _fused_attention(), FakeTensorMode():
                    warnings.simplefilter("ignore")
                    module = build(model).train()
                    if any(isinstance(each, nn.RNNBase) for each in module.modules()):
                        raise MemoryPlanError(
                            f"{model.name}: zlaunch cannot estimate the activations of recurrent layers "
                            "(nn.LSTM); omit --input to see the rest"
                        )
                    if checkpointed:
                        try:
                            checkpoint_blocks(module)
                        except ValueError:
                            return None
                    return run(module)
            except MemoryPlanError:
                raise
            except ParameterError as error:  # what a config would be told, too
                raise MemoryPlanError(f"{model.name}: {error}") from None
            except Exception as error:
                first = first or error
    finally:
        torch.set_default_dtype(before)
        log.setLevel(level)
    assert first is not None
    hint = (
        ""
        if inputs is not None
        else (". If its input is not token ids, write a function that builds it, and pass MODEL and --input")
    )
    raise MemoryPlanError(
        f"{model.name} cannot be run on fake tensors{_shown(inputs, dtype)}: {described(first)}{hint}"
    ) from first


def _built_on_meta(model: ModelSizes) -> nn.Module:
    """Build a model on the meta device and give it fake tensors: constructors may look at values, and copies
    of fake tensors belong to another mode. Tensors in plain attributes stay as they are.
    """
    assert model.build is not None
    with unset_fake_temporarily(), torch.device("meta"):
        module = model.build()
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for part in module.modules():
        for name, old in [*part._parameters.items(), *part._buffers.items()]:
            if old is not None and id(old) not in made:
                new = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype)
                is_parameter = isinstance(old, nn.Parameter)
                made[id(old)] = old, nn.Parameter(new, old.requires_grad) if is_parameter else new
            if old is not None:
                setattr(part, name, made[id(old)][1])
    return module


def _built(model: ModelSizes) -> nn.Module:
    assert model.build is not None
    return model.build()


class _PeakTracker(MemTracker):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """Follows the peak of the whole model. Torch's tracker also looks at each module after each operation:
    three quarters of the time of a large model.
    """

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Keep the largest sum so far, and what it is made of."""
        for device, amounts in self._curr_mem_snap.items():
            if self._peak_mem.get(device, 0) < amounts[_TOTAL]:
                self._peak_mem[device] = amounts[_TOTAL]
                self._peak_mem_snap[device] = dict(amounts)


class _Workspaces(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is untyped
    """Makes what the backward pass of a convolution takes for itself: its kernels, oneDNN's and, for channels
    that come last, cuDNN's, copy the input and the gradient into a layout of their own.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation with such copies beside it."""
        backward = func is torch.ops.aten.convolution_backward.default
        held = [torch.empty_like(each) for each in args[:2]] if backward else []
        result = func(*args, **(kwargs or {}))
        held.clear()
        return result


@contextmanager
def _whole_sequences() -> Iterator[None]:
    """Let transformers take the tokens of a sample for one sequence. It looks for several in the positions,
    which fake tensors cannot show, and would make a mask that a real step does without.
    """
    name = "find_packed_sequence_indices"
    masks = sys.modules.get("transformers.masking_utils")
    before = getattr(masks, name, None)
    if masks is None or before is None:
        yield
        return
    setattr(masks, name, lambda *args, **kwargs: None)
    try:
        yield
    finally:
        setattr(masks, name, before)


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Let torch's attention keep no matrix of scores where it drops some: on a CPU, where the fake tensors
    are, its dropout needs one; the kernels of GPUs do without.
    """
    before = functional.scaled_dot_product_attention

    def without_dropout(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **more: Any,
    ) -> Tensor:
        result: Tensor = before(query, key, value, attn_mask, 0.0, *args, **more)
        return result

    functional.scaled_dot_product_attention = without_dropout
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = before


def _shown(inputs: Shape | None, dtype: torch.dtype) -> str:
    if inputs is None:
        return ""
    sizes, kind = inputs
    name = str(kind or dtype).removeprefix("torch.")
    hint = "" if kind else "; for token ids, add :int64 to --input"
    return f", with an input of {','.join(map(str, sizes))} in {name}{hint}"


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def fake_inputs(sequence: int, micro_batch: int, dtype: torch.dtype, inputs: Shape | None) -> Any:
    """Make the input that `zlaunch estimate --input` describes, or the inputs of a language model."""
    if inputs is not None:
        sizes, kind = inputs
        return torch.empty(list(sizes), dtype=kind or dtype)
    ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def loss_of(module: nn.Module, given: Any) -> Tensor:
    """Run a module; return its loss, or the sum of its outputs. Raises MemoryPlanError."""
    output = module(**given) if isinstance(given, dict) else module(given)
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not tensors:
        raise MemoryPlanError("the model's output has no tensor with a gradient")
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()
