"""Lets the ranks of an axis have different parts of each sequence that a model is given."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import nn

from ..activation.tiled_loss import LossParts
from ..comm.collectives import Comm
from ..config import Config
from ..environment import read_environment
from ..errors import ParameterError
from ..log import detail, say
from ..model_plans import causal_model, text_config
from ..rank_mesh import MeshShape
from .attention import heads_problem, note_engine
from .axis import SequenceAxis
from .forward import PartsForward, SequenceForward
from .loss import PartOfLabels, SequenceLoss, SequenceTotals
from .masks import wrap_mask_functions
from .parts import NOTE as PARTS
from .rotary import give_whole_lengths
from .script import ScriptForward
from .transformers_attention import NOTE, wrap_attention_function

_FULL = {"full_attention", "sliding_attention", "chunked_attention"}
_MIX_TOKENS = (nn.RNNBase, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def share_sequences(model: nn.Module, config: Config, comm: Comm) -> LossParts | None:
    """Let a model compute on parts of sequences, if ranks have different ones; return how the ranks add up a
    loss, None where each has its own or the script does it.

    A causal language model of Hugging Face takes whole batches, equal on all ranks of the axis, and gives the
    loss of all parts; any other model calls ``zlaunch.sequence``. Collective. Raises ParameterError for a
    model that cannot be divided.
    """
    note_engine(divides=comm.mesh.sequence > 1)
    if comm.mesh.sequence == 1:
        return None
    owner = causal_model(model)
    if owner is not None:  # before ranks meet in the group: no rank waits for one that has refused
        _check(owner, comm.mesh)
    axis = SequenceAxis(comm)
    parts = None
    if owner is None:
        model.forward = ScriptForward(model, axis)
    else:
        parts = _divide(owner, axis, steps_in_backward=config.zero_optimization.step_in_backward)
    if comm.rank == 0:
        local = read_environment().local_world_size
        block = axis.size * comm.mesh.tensor
        crossing = f"; warning: groups of {block} ranks span nodes of {local} ranks" if local % block else ""
        how = "split by the script" if owner is None else type(owner).__name__
        tell = say if crossing else detail
        tell(f"sequence parallelism: {axis.size} ranks per sequence ({how}){crossing}")
    return parts


def _divide(model: Any, axis: SequenceAxis, *, steps_in_backward: bool) -> LossParts | None:
    """Install what a Hugging Face model computes on parts; return how its loss is added up."""
    config = text_config(model)
    wrap_attention_function(config._attn_implementation)
    for module in model.modules():
        setattr(module, NOTE, axis)
    give_whole_lengths(model, axis)
    whole_evaluations = getattr(model, PARTS, None)
    # a pass through a stage of a pipeline calls some of the layers
    layers = config.num_hidden_layers if axis.comm.mesh.pipeline == 1 else 1
    if whole_evaluations is not None:
        model.forward = PartsForward(model, axis, layers, whole_evaluations)
        return None
    model.loss_function = SequenceLoss(axis, model.loss_function)
    model.forward = SequenceForward(model, axis, layers, steps_in_backward=steps_in_backward)
    return LossParts(PartOfLabels(axis), SequenceTotals(axis))


def _check(model: Any, mesh: MeshShape) -> None:
    """Raise ParameterError for a Hugging Face model whose parts cannot be computed by themselves; wrap the
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
        if isinstance(module, _MIX_TOKENS):
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
