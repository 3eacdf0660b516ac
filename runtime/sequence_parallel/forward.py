"""Defines what a Hugging Face model computes where ranks have parts of each sequence."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ParameterError
from ..same_batch import SameBatch
from .axis import SequenceAxis
from .loss import IGNORED
from .masks import WholeSequences, passes

_DIVIDED = ("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "labels", "shift_labels")
"""Names the inputs with tokens in the second dimension, of which each rank gets its part."""
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
        self.module, self.axis, self.layers = module, axis, layers
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
        """Raise ParameterError for arguments that parts of sequences cannot have."""
        for name, what in _REFUSED.items():
            value = given.get(name, getattr(self.module.config, name, None) if "router" in name else None)
            if value is not None and not (isinstance(value, (bool, int)) and not value):
                raise ParameterError(f"sequence parallelism: {what} is not supported")
        if given.get("use_cache"):
            raise ParameterError("sequence parallelism: training with use_cache=True is not supported")

    def compute(self, given: dict[str, Any], length: int, position_ids: Tensor) -> Any:
        """Call the model's own forward with this rank's parts of sequences, of which ``length`` and
        ``position_ids`` are of the whole. Raises ParameterError if some of its attention was on parts.
        """
        has_cache = given.get("use_cache", getattr(self.module.config, "use_cache", False))
        if "use_cache" in self.__signature__.parameters:
            given["use_cache"] = False
        before, self.axis.positions = self.axis.attentions, position_ids
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
    """Takes whole sequences, the same on all ranks of the axis, and computes with this rank's part; the loss
    is that of all parts, everything else in the output is this rank's.
    """

    def __init__(self, module: Any, axis: SequenceAxis, layers: int, *, steps_in_backward: bool) -> None:
        super().__init__(module, axis, layers)
        first = axis.comm.mesh.groups("sequence")
        own = next(ranks for ranks in first if axis.comm.rank in ranks)
        self._batch = SameBatch(
            axis.comm,
            own,
            axis.largest,
            f"ranks {', '.join(map(str, own))} are one sequence-parallel group but got different batches: "
            "pass the same whole batch on each rank. Use a DistributedSampler with "
            "num_replicas=engine.data_parallel_size and rank=engine.data_parallel_rank; in the Trainer, "
            "ParallelismConfig(sp_size=...)",
            every_pass=steps_in_backward,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with this rank's part. Raises ParameterError for inputs that cannot be divided,
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
                given[name] = self._part(name, value, length)
        calls = self.module.loss_function.calls
        output = self.compute(given, length, position_ids)
        if "labels" in given and self.module.loss_function.calls == calls:
            raise ParameterError(
                f"sequence parallelism: {type(self.module).__name__} computes its own loss, which is not "
                "supported"
            )
        return output

    def _part(self, name: str, value: Tensor, length: int) -> Tensor:
        if name in _DIVIDED:
            if value.dim() < 2 or value.shape[1] != length:
                raise ParameterError(
                    f"sequence parallelism: {name} is {list(value.shape)}, but there are {length} tokens in "
                    "the second dimension of the model's inputs"
                )
            return self.axis.part(value)
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


class PartsForward(_Forward):
    """Takes this rank's part of sequences, as a script or its loader has divided them, with position_ids."""

    def __init__(self, module: Any, axis: SequenceAxis, layers: int, whole_evaluations: bool) -> None:
        super().__init__(module, axis, layers)
        self._whole_evaluations = whole_evaluations

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with this rank's part. Raises ParameterError without position_ids."""
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
