"""Lets the ranks of an axis have different shards of each sequence that a model is given."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..activation.tiles import LossParts, chunked_cross_entropy
from ..comm.collectives import Comm
from ..config import Config
from ..environment import read_environment
from ..errors import ParameterError
from ..log import detail, say, warn
from ..mesh import MeshShape
from ..models import causal_model, text_config
from .attention import (
    CHECK,
    LOSS,
    NOTE,
    SequenceAxis,
    WholeSequences,
    heads_problem,
    note_engine,
    passes,
    wrap_attention_function,
    wrap_mask_functions,
)
from .checks import SameBatch
from .collectives import total

# -- loss -------------------------------------------------------------------------------------------
#
# Computes a causal language model's loss where each rank has a shard of the logits' tokens.


IGNORED = -100


class SequenceLoss:
    """Computes the mean cross-entropy of all tokens from this rank's logits, (..., tokens / ranks,
    vocabulary), in place of Hugging Face's ForCausalLMLoss: labels have been shifted already.
    """

    def __init__(self, axis: SequenceAxis, whole: Callable[..., Tensor]) -> None:
        """``whole`` computes the loss outside of a pass with shards of sequences."""
        self.axis = axis
        self.whole = whole
        self.calls = 0

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the mean (or the sum divided by ``num_items_in_batch``) over the labels that count."""
        if not passes:
            return self.whole(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
            )
        self.calls += 1
        wanted = labels if shift_labels is None else shift_labels
        assert wanted is not None
        wanted = wanted.reshape(-1).to(logits.device)
        own = chunked_cross_entropy(logits.reshape(-1, logits.shape[-1]), wanted, ignore_index)
        summed, count = SequenceTotals(self.axis)(own, (wanted != ignore_index).sum())
        if num_items_in_batch is None:
            return summed / count
        if isinstance(num_items_in_batch, Tensor):
            num_items_in_batch = num_items_in_batch.to(summed.device)
        mean: Tensor = summed / num_items_in_batch
        return mean


class LocalLabels:
    """Returns this rank's shard of labels, in a pass with shards of sequences; else all."""

    def __init__(self, axis: SequenceAxis) -> None:
        self.axis = axis

    def __call__(self, labels: Tensor) -> Tensor:
        return self.axis.shard(labels) if self.axis.is_open else labels


class SequenceTotals:
    """Adds up the sum of losses, and their number, over the ranks that share sequences."""

    def __init__(self, axis: SequenceAxis) -> None:
        self.axis = axis

    def __call__(self, summed: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        if not passes:
            return summed, count
        return total(summed, self.axis, LOSS), self.axis.sum(count, LOSS)


# -- forward ----------------------------------------------------------------------------------------
#
# Defines what a Hugging Face model computes where ranks have shards of each sequence.


_DIVIDED = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "labels", "shift_labels")
"""Names the inputs with tokens in the second dimension, of which each rank gets its shard."""
_WHOLE = ("attention_mask",)
_REFUSED = {
    "past_key_values": "a cache",
    "encoder_hidden_states": "an encoder",
    "encoder_attention_mask": "an encoder",
    "output_attentions": "output_attentions",
    "output_router_logits": "the router's loss (output_router_logits)",
    "logits_to_keep": "logits_to_keep",
}


class _Forward:
    """Replaces a model's forward; a copy of the model computes with the copied module."""

    def __init__(self, module: Any, axis: SequenceAxis, layers: int) -> None:
        self.module = module
        self.axis = axis
        self.layers = layers
        self.__signature__ = inspect.signature(type(module).forward)  # with self, as torch's wrappers have it
        self.__signature__ = self.__signature__.replace(
            parameters=list(self.__signature__.parameters.values())[1:]
        )

    def original(self, given: dict[str, Any]) -> Any:
        """Call the model's own forward."""
        return type(self.module).forward(self.module, **given)

    def bind(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the arguments of a call by name, without those that are None."""
        bound = self.__signature__.bind(*args, **kwargs).arguments
        open_names = [n for n, p in self.__signature__.parameters.items() if p.kind is p.VAR_KEYWORD]
        for name in open_names:
            bound |= bound.pop(name, {})
        return {name: value for name, value in bound.items() if value is not None}

    def refuse(self, given: dict[str, Any]) -> None:
        """Raise ParameterError for arguments that shards of sequences cannot have."""
        for name, what in _REFUSED.items():
            value = given.get(name, getattr(self.module.config, name, None) if "router" in name else None)
            if value is not None and not (isinstance(value, (bool, int)) and not value):
                raise ParameterError(f"sequence parallelism: {what} is not supported")
        if given.get("use_cache"):
            raise ParameterError("sequence parallelism: training with use_cache=True is not supported")

    def compute(self, given: dict[str, Any], length: int, position_ids: Tensor) -> Any:
        """Call the model's own forward with this rank's shards of sequences, of which ``length`` and
        ``position_ids`` are of the whole. Raises ParameterError if some of its attention was on shards.
        """
        has_cache = given.get("use_cache", getattr(self.module.config, "use_cache", False))
        if "use_cache" in self.__signature__.parameters:
            given["use_cache"] = False
        before = self.axis.attentions
        self.axis.positions = position_ids
        passes.append(WholeSequences(length, None if has_cache else position_ids))
        try:
            output = self.original(given)
        finally:
            passes.pop()
        if self.axis.attentions - before < self.layers:
            raise ParameterError(
                f"sequence parallelism: {type(self.module).__name__} is not supported: only "
                f"{self.axis.attentions - before} of its {self.layers} layers use transformers' attention "
                "functions"
            )
        return output


class SequenceForward(_Forward):
    """Takes whole sequences, the same on all ranks of the axis, and computes with this rank's shard; the loss
    is that of all shards, everything else in the output is this rank's.
    """

    def __init__(self, module: Any, axis: SequenceAxis, layers: int, *, steps_in_backward: bool) -> None:
        super().__init__(module, axis, layers)
        self._batch = SameBatch(
            axis,
            CHECK,
            f"ranks {', '.join(map(str, axis.ranks))} are one sequence-parallel group but got different "
            "batches: pass the same whole batch on each rank. Use a DistributedSampler with "
            "num_replicas=engine.data_parallel_size and rank=engine.data_parallel_rank; in the Trainer, "
            "ParallelismConfig(sp_size=...)",
            every_pass=steps_in_backward,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with this rank's shard. Raises ParameterError for inputs that cannot be divided,
        RankMismatchError where the ranks were given different ones.
        """
        given = self.bind(args, kwargs)
        evaluates = not self.module.training
        caches = given.get("use_cache") or "past_key_values" in given
        if not self.axis.is_open or (evaluates and caches and "labels" not in given):
            return self.original(given)
        self._batch.check(given, always=not (self.module.training and torch.is_grad_enabled()))
        self.refuse(given)
        source = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(source, Tensor):
            raise ParameterError("sequence parallelism: the model got neither input_ids nor inputs_embeds")
        length = source.shape[1]
        if "position_ids" not in given:
            self._check_padding(given.get("attention_mask"))
            given["position_ids"] = torch.arange(length, device=source.device).unsqueeze(0)
        if "labels" in given:
            given["labels"] = functional.pad(given["labels"], (0, 1), value=IGNORED)[..., 1:]
        position_ids = given["position_ids"]
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in _WHOLE:
                given[name] = self._shard(name, value, length)
        calls = self.module.loss_function.calls
        output = self.compute(given, length, position_ids)
        if "labels" in given and self.module.loss_function.calls == calls:
            raise ParameterError(
                f"sequence parallelism: {type(self.module).__name__} computes its own loss, which is not "
                "supported"
            )
        return output

    def _shard(self, name: str, value: Tensor, length: int) -> Tensor:
        if name in _DIVIDED:
            if value.dim() < 2 or value.shape[1] != length:
                raise ParameterError(
                    f"sequence parallelism: {name} is {list(value.shape)}, but there are {length} tokens in "
                    "the second dimension of the model's inputs"
                )
            return self.axis.shard(value)
        if value.dim() == 0 or name.startswith(("cu_seq", "max_length")):
            return value  # about the batch
        raise ParameterError(f"sequence parallelism: the input {name}, {list(value.shape)}, is not supported")

    def _check_padding(self, mask: Any) -> None:
        """Raise ParameterError where a model would make positions of a mask with padding."""
        if not isinstance(mask, Tensor) or mask.dim() != 2 or bool(mask.all()):
            return
        source = inspect.getsource(sys.modules[type(self.module).__module__])
        if "cumsum(" in source:
            raise ParameterError(
                f"sequence parallelism: {type(self.module).__name__} derives positions from the attention "
                "mask, which has padding: pass position_ids"
            )


class ShardsForward(_Forward):
    """Takes this rank's shard of sequences, as a script or its loader has divided them, with position_ids."""

    def __init__(self, module: Any, axis: SequenceAxis, layers: int, whole_evaluations: bool) -> None:
        super().__init__(module, axis, layers)
        self._whole_evaluations = whole_evaluations

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with this rank's shard. Raises ParameterError without position_ids."""
        given = self.bind(args, kwargs)
        if not self.axis.is_open or (self._whole_evaluations and not self.module.training):
            return self.original(given)
        self.refuse(given)
        positions = given.get("position_ids")
        if not isinstance(positions, Tensor) or positions.dim() != 2:
            raise ParameterError(
                "sequence parallelism: a batch of sequence shards needs position_ids, (batch, tokens): "
                "include them in the batches for UlyssesSPDataLoaderAdapter"
            )
        if "labels" in given and "shift_labels" not in given:
            raise ParameterError(
                "sequence parallelism: the model cannot shift the labels of a sequence shard: pass "
                "shift_labels, as UlyssesSPDataLoaderAdapter does"
            )
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            given["attention_mask"] = self.axis.gather(mask)
        return self.compute(given, positions.shape[1] * self.axis.size, self.axis.gather(positions))


# -- rotary -----------------------------------------------------------------------------------------
#
# Gives rotary embeddings whose frequencies depend on the length of a sequence the whole sequences' one.


_BY_LENGTH = ("dynamic", "longrope")


class RotaryForward:
    """Replaces a rotary embedding's forward: computes with whole sequences, and returns this rank's shard."""

    def __init__(self, module: Any, axis: SequenceAxis) -> None:
        self.module = module
        self.axis = axis

    def __call__(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return cosines and sines, (batch or 1, tokens, width), of this rank's tokens."""
        whole = self.axis.positions
        forward = type(self.module).forward
        is_shard = whole is not None and whole.shape[-1] == position_ids.shape[-1] * self.axis.size
        if whole is None or not is_shard:
            return forward(self.module, x, position_ids, *args, **kwargs)
        found = forward(self.module, x, whole, *args, **kwargs)
        return tuple(self.axis.shard(each, dim=each.dim() - 2) for each in found)


def give_whole_lengths(model: nn.Module, axis: SequenceAxis) -> None:
    """Let the rotary embeddings of a Hugging Face model see the length of whole sequences, if they use it."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(isinstance(name, str) and any(each in name for each in _BY_LENGTH) for name in names):
            module.forward = RotaryForward(module, axis)


# -- script -----------------------------------------------------------------------------------------
#
# Watches a model whose script divides sequences by ``zlaunch.sequence``.


_MIX_CALLS = ("scaled_dot_product_attention", "conv1d", "lstm", "gru", "rnn_tanh", "rnn_relu", "cumsum")


class _MixedTokens(TorchFunctionMode):
    """Notes the operations of a pass that mix tokens, other than those of ``zlaunch.sequence``."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _MIX_CALLS and not sys._getframe(1).f_globals.get("__name__", "").startswith("zlaunch."):
            self.names[name] = None
        return func(*args, **(kwargs or {}))


class ScriptForward:
    """Replaces a model's forward: it has to call ``zlaunch.sequence.attention``, or the ranks that share
    sequences would compute the same, or something wrong, without a word.
    """

    def __init__(self, module: nn.Module, axis: SequenceAxis) -> None:
        self.module = module
        self.axis = axis
        self._has_looked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's own forward. Raises ParameterError if it computes no attention on whole sequences
        while it trains.
        """
        before = self.axis.attentions
        looks = self.axis.is_open and self.module.training and not self._has_looked
        mixed = _MixedTokens()
        with mixed if looks and not torch.compiler.is_compiling() else nullcontext():
            output = type(self.module).forward(self.module, *args, **kwargs)
        self._has_looked = self._has_looked or looks
        if mixed.names and self.axis.comm.rank == 0:
            warn(
                f"sequence parallelism: the model calls {', '.join(mixed.names)}, which sees only this "
                "rank's shard of each sequence. Use zlaunch.sequence.attention, which attends to whole "
                "sequences"
            )
        if self.axis.is_open and self.module.training and self.axis.attentions == before:
            raise ParameterError(
                f"parallel.sequence is {self.axis.size}, but {type(self.module).__name__} has not called "
                "zlaunch.sequence.attention: split the sequences with zlaunch.sequence.split and call it "
                "instead of scaled_dot_product_attention, or set the size to 1"
            )
        return output


# -- shards -----------------------------------------------------------------------------------------
#
# Notes that a script gives each rank its shard of sequences, instead of whole ones.


SHARDS = "zlaunch_gets_shards"
"""Names the attribute of a model that gets shards; its value tells whether evaluations get whole ones."""


def note_shards(model: nn.Module, whole_evaluations: bool) -> None:
    """Note on the Hugging Face model in a model that it gets shards of sequences with their position_ids."""
    owner = causal_model(model)
    if owner is not None:
        setattr(owner, SHARDS, whole_evaluations)


# -- apply ------------------------------------------------------------------------------------------


_FULL = {"full_attention", "sliding_attention", "chunked_attention"}
_MIX_LAYERS = (nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def share_sequences(model: nn.Module, config: Config, comm: Comm) -> LossParts | None:
    """Let a model compute on shards of sequences, if ranks have different ones; return how the ranks add up a
    loss, None where each has its own or the script does it.

    A causal language model of Hugging Face takes whole batches, equal on all ranks of the axis, and gives the
    loss of all shards; any other model calls ``zlaunch.sequence``. Collective. Raises ParameterError for a
    model that cannot be divided.
    """
    note_engine(divides=comm.mesh.sequence > 1)
    if comm.mesh.sequence == 1:
        return None
    owner = causal_model(model)
    if owner is not None:  # before ranks meet in the group: no rank waits for one that has refused
        _check(owner, comm.mesh)
    axis = SequenceAxis(comm)
    loss_parts = None
    if owner is None:
        model.forward = ScriptForward(model, axis)
    else:
        loss_parts = _divide(owner, axis, steps_in_backward=config.zero_optimization.step_in_backward)
    if comm.rank == 0:
        local = read_environment().local_world_size
        block = axis.size * comm.mesh.tensor
        crossing = f"; warning: groups of {block} ranks span nodes of {local} ranks" if local % block else ""
        how = "split by the script" if owner is None else type(owner).__name__
        tell = say if crossing else detail
        tell(f"sequence parallelism: {axis.size} ranks per sequence ({how}){crossing}")
    return loss_parts


def _divide(model: Any, axis: SequenceAxis, *, steps_in_backward: bool) -> LossParts | None:
    """Install what a Hugging Face model computes on shards; return how its loss is added up."""
    config = text_config(model)
    wrap_attention_function(config._attn_implementation)
    for module in model.modules():
        setattr(module, NOTE, axis)
    give_whole_lengths(model, axis)
    whole_evaluations = getattr(model, SHARDS, None)
    # a pass through a stage of a pipeline calls some of the layers
    layers = config.num_hidden_layers if axis.comm.mesh.pipeline == 1 else 1
    if whole_evaluations is not None:
        model.forward = ShardsForward(model, axis, layers, whole_evaluations)
        return None
    model.loss_function = SequenceLoss(axis, model.loss_function)
    model.forward = SequenceForward(model, axis, layers, steps_in_backward=steps_in_backward)
    return LossParts(LocalLabels(axis), SequenceTotals(axis))


def _check(model: Any, mesh: MeshShape) -> None:
    """Raise ParameterError for a Hugging Face model whose shards cannot be computed by themselves; wrap the
    functions that make masks for any other.
    """
    config = text_config(model)
    head = model.get_output_embeddings()
    if head is None or getattr(model, "loss_type", None) not in (None, "ForCausalLM"):
        raise _refused(model, "it is not a causal language model with a head (...ForCausalLM)")
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(model, "it has an encoder")
    names = inspect.signature(type(model).forward).parameters
    if "position_ids" not in names:
        raise _refused(model, "its forward takes no position_ids")
    kinds = set(getattr(config, "layer_types", None) or ()) - _FULL
    if kinds:
        raise _refused(model, f"its layers of type {', '.join(sorted(kinds))} keep a recurrent state")
    for name, module in model.named_modules():
        if isinstance(module, _MIX_LAYERS):
            raise _refused(model, f"{name}, a {type(module).__name__}, mixes tokens outside attention")
    if not getattr(model, "_supports_attention_backend", False) and not _uses_interface(model):
        raise _refused(model, "its attention does not use transformers' attention functions")
    implementation = config._attn_implementation
    if implementation in (None, "eager") or "|" in str(implementation):
        raise _refused(model, f'its attention is {implementation!r}: load it with attn_implementation="sdpa"')
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if isinstance(heads, int) and isinstance(keys, int):
        local = heads // mesh.tensor, max(keys // mesh.tensor, 1)
        if problem := heads_problem(mesh.sequence, *local):
            raise ParameterError(problem)
    if not wrap_mask_functions(model):
        raise _refused(model, "it builds its own attention masks")


def _uses_interface(model: nn.Module) -> bool:
    return hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS")


def _refused(model: nn.Module, why: str) -> ParameterError:
    return ParameterError(f"sequence parallelism: {type(model).__name__} is not supported: {why}")
