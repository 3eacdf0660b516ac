"""Reads the sizes of a model from a function that builds it, from a Hugging Face config, or from numbers."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..activation.tiles import changes_logits, find_head
from ..comm.axis import Axis, Channel
from ..comm.pending import DONE, Pending
from ..comm.shard_spec import box_shape
from ..errors import MemoryPlanError, ParameterError
from ..mesh import MeshShape
from ..models import causal_model
from ..parallel.pipeline import LayerSequence, divide, find_layers, owners_of, weights_of
from ..parallel.plans import find_plan
from ..parallel.tensor import Decision
from ..parallel.tensor_axis import TensorAxis
from ..zero.policy import DIVIDED_NUMEL, UNIT_NUMEL, ShardingOptions, plan_blocks

# -- model sizes ------------------------------------------------------------------------------------


Builder = Callable[[], nn.Module]
Blocks = list[list[nn.Parameter]]
SHARDED = ShardingOptions(shard_optimizer=True, shard_grads=True, shard_params=True)
"""Cuts a model into blocks as stage 3 does."""
_HUB_NAME = re.compile(r"(?!.*\.json$)\w[\w.-]*(/\w[\w.-]*)?")
_HUB_TIMEOUT_S = 10.0
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (1, ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """Describes a model that need not exist; sizes in elements."""

    name: str
    blocks: tuple[int, ...]
    """Counts the trainable elements of each block, the root block first, as stage 3 cuts them."""
    frozen_blocks: tuple[int, ...] = ()
    """Counts the other elements of each block, in the same order; the last blocks may have none."""
    experts: int = 0
    """Counts the trainable elements of experts that only some ranks have."""
    hidden: int | None = None
    layers: int | None = None
    vocab: int | None = None
    positions: int | None = None
    """Counts the positions of a Hugging Face model; some can be run with more."""
    build: Builder | None = None
    """Builds the module; None where only numbers are known."""
    is_language_model: bool = False
    """Tells that it takes ``input_ids`` and ``labels`` and returns a loss, as Hugging Face's models do."""
    takes_tiled_loss: bool = True
    """Tells that ``activation_checkpointing.tiled_loss`` does not refuse it, as far as that can be seen."""

    @property
    def numel(self) -> int:
        """Return the elements of all parameters."""
        return sum(self.blocks) + self.frozen

    @property
    def frozen(self) -> int:
        return sum(self.frozen_blocks)

    def blocks_at(self, stage: int) -> Sequence[int]:
        """Return the sizes of the blocks at a stage: below 3, small neighbours share one."""
        if stage >= 3:
            return self.blocks
        joined: list[int] = []
        for block in self.blocks[1:]:
            if joined and joined[-1] + block <= UNIT_NUMEL:
                joined[-1] += block
            else:
                joined.append(block)
        return [self.blocks[0], *joined]


def from_numbers(params: float, hidden: int | None, layers: int | None, vocab: int | None) -> ModelSizes:
    """Describe a transformer by its number of parameters, its width and its depth. A layer has 12 times the
    square of the width (Kaplan et al., 2020, table 1), of which attention has a third; without both it is one
    block. Raises MemoryPlanError.
    """
    total = int(params)
    layer = 12 * hidden * hidden if hidden is not None else 0
    size, unit = next((each for each in _UNITS if total >= each[0]), _UNITS[-1])
    name = f"a model of {total / size:.4g}{unit} parameters"
    if hidden is None or layers is None:
        return ModelSizes(name=name, blocks=(0, total), hidden=hidden, layers=layers, vocab=vocab)
    if layer * layers > total:
        raise MemoryPlanError(
            f"{layers} layers with hidden size {hidden} have {layer * layers:.4g} parameters, more than the "
            f"{total:.4g} of --params"
        )
    blocks = (total - layer * layers, *_parts_of_layer(hidden * hidden) * layers)
    return ModelSizes(name=name, blocks=blocks, hidden=hidden, layers=layers, vocab=vocab)


def _parts_of_layer(square: int) -> list[int]:
    """Return the sizes of the blocks that stage 3 divides a transformer's layer into; ``square`` is what a
    rank has of a matrix of the width.
    """
    if 12 * square <= DIVIDED_NUMEL:
        return [12 * square]
    attention = [4 * square] if 4 * square <= DIVIDED_NUMEL else [square] * 4
    mlp = [8 * square] if 8 * square <= DIVIDED_NUMEL else [4 * square] * 2
    return attention + mlp


def from_function(target: str) -> ModelSizes:
    """Describe the model that a function without arguments builds: ``package.module:function`` or
    ``file.py:function``. It is built on the meta device. Raises MemoryPlanError.
    """
    build = _find(target)
    return _of_module(target, build)


def from_hugging_face(path: str) -> ModelSizes:
    """Describe the model of a Hugging Face ``config.json``, of the folder with it, or of a name on the Hub.

    Raises MemoryPlanError.
    """
    if not Path(path).exists() and not _HUB_NAME.fullmatch(path):
        raise MemoryPlanError(f"{path}: no such file or folder, and no model of that name on the Hub")
    try:
        import transformers
    except ImportError:
        raise MemoryPlanError("--hf_config needs transformers: pip install 'zlaunch[hf]'") from None
    config: Any
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if Path(path).exists() or isinstance(error, KeyError):
            raise MemoryPlanError(
                f"{path} is not a model config of transformers {transformers.__version__}: {error}"
            ) from None
        config = _from_hub(path)
    names = list(getattr(config, "architectures", None) or [])
    kind = getattr(transformers, names[0], None) if names else None

    def build() -> nn.Module:
        maker: Any = kind or transformers.AutoModelForCausalLM.from_config
        built: nn.Module = maker(config)
        return built

    found = _of_module(path, build, is_language_model=True, vocab=getattr(config, "vocab_size", None))
    positions = getattr(config, "max_position_embeddings", None)
    hidden = getattr(config, "hidden_size", None)
    return replace(
        found,
        positions=positions if isinstance(positions, int) else None,
        hidden=hidden if isinstance(hidden, int) else None,
    )


def _from_hub(name: str) -> Any:
    """Download a model's config. The Hub is asked once first: downloads try again for half a minute."""
    import transformers
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    api = HfApi()
    try:
        api.model_info(name, timeout=_HUB_TIMEOUT_S)
    except RepositoryNotFoundError:
        raise MemoryPlanError(
            f"{name}: no such file or folder, and no such model at {api.endpoint}"
        ) from None
    except Exception as error:  # of the Hub's client and the HTTP library below it, which changes
        raise MemoryPlanError(
            f"{name}: no such file or folder, and {api.endpoint} does not answer ({_first_line(error)}). "
            "Download the model's config.json and pass its path, or use --params"
        ) from None
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise MemoryPlanError(f"{name} at {api.endpoint}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _of_module(
    name: str, build: Builder, *, is_language_model: bool = False, vocab: int | None = None
) -> ModelSizes:
    try:
        with torch.device("meta"):
            model = build()
    except (Exception, SystemExit) as error:
        raise MemoryPlanError(
            f"{name} failed on torch's meta device, where tensors have no values: {described(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise MemoryPlanError(f"{name} returns {type(model).__name__}, not an nn.Module")
    blocks = _blocks_of(model)
    language_model = causal_model(model)
    return ModelSizes(
        name=name,
        blocks=_numels(blocks, trainable=True),
        frozen_blocks=_numels(blocks, trainable=False),
        vocab=vocab,
        build=build,
        is_language_model=is_language_model,
        takes_tiled_loss=find_head(language_model) is not None and not changes_logits(language_model),
    )


def _find(target: str) -> Builder:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise MemoryPlanError(f"{target!r}: expected package.module:function or file.py:function")
    if place.endswith(".py") and not Path(place).is_file():
        raise MemoryPlanError(f"{place}: no such file")
    sys.path.insert(0, "")
    own = sys.argv
    sys.argv = [place]  # the script must not read our arguments
    try:
        if place.endswith(".py"):
            # not the file's own name: a model in `json.py` must not take the place of that module
            spec = importlib.util.spec_from_file_location(f"zlaunch_model_in_{Path(place).stem}", place)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module  # dataclasses of the file look for it there
            sys.path.insert(0, str(Path(place).resolve().parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except (ModuleNotFoundError, SyntaxError) as error:
        raise MemoryPlanError(f"{place} cannot be imported: {described(error)}") from error
    except (Exception, SystemExit) as error:
        raise MemoryPlanError(
            f"{place} failed during import: {described(error)}. If it is a script, put its training code "
            'under `if __name__ == "__main__":`'
        ) from error
    finally:
        sys.argv = own
    found: Any = getattr(module, name, None)
    if not callable(found):
        what = (
            f"{name} is a {type(found).__name__}, not a function" if hasattr(module, name) else "no such name"
        )
        near = difflib.get_close_matches(name, [each for each in dir(module) if each[0] != "_"], n=1)
        hint = f"; did you mean {near[0]}?" if near and not hasattr(module, name) else ""
        raise MemoryPlanError(f"{target}: {what}{hint}")
    needed = _needed_arguments(found)
    if needed:
        raise MemoryPlanError(
            f"{target} needs arguments ({', '.join(needed)}): use a function without required arguments"
        )
    build: Builder = found
    return build


def _needed_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some built-in ones it is not known
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional]


def described(error: BaseException) -> str:
    """Describe an error in one line, with the line of the user's code that it comes from."""
    known = tuple(str(Path(module.__file__ or "").parent) for module in (os, torch, sys.modules[__name__]))
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith((*known, "<"))]
    where = f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {str(error) or 'no message'}{where}"


# -- axes -------------------------------------------------------------------------------------------
#
# Describes what one rank has of a model whose layers, experts or stages several ranks share.


def _blocks_of(model: nn.Module) -> Blocks:
    """Return the parameters of each block at stage 3, the root block's first."""
    root, *rest = ([p for _, p in block.parameters] for block in plan_blocks(model, SHARDED))
    return [root, *filter(None, rest)]


def _numels(blocks: Blocks, *, trainable: bool) -> tuple[int, ...]:
    """Count the elements of each block that an optimizer updates, or the others."""
    return tuple(sum(p.numel() for p in block if p.requires_grad is trainable) for block in blocks)


class _OneRankAxis(TensorAxis):
    """Replaces the tensor axis when there is one process: results have the sizes of a real axis, and other
    values.
    """

    def begin_sum(self, tensor: Tensor, channel: Channel) -> Pending:
        return DONE

    def max(self, tensor: Tensor, channel: Channel) -> Tensor:
        return tensor

    def all_gather(self, shard: Tensor, channel: Channel) -> list[Tensor]:
        return [shard] * self.size


def of_one_rank(model: ModelSizes, mesh: MeshShape) -> ModelSizes:
    """Describe what the rank that has most has of a model: the parts of its layers and experts, and of a
    pipeline the heaviest stage. Raises MemoryPlanError for a model that cannot be divided so.
    """
    if mesh.tensor == mesh.expert == mesh.pipeline == 1:
        return model
    if model.build is None:
        return _of_numbers(model, mesh)
    build = model.build

    def shared() -> nn.Module:
        """Build the model that a pass runs. It keeps all experts: with this rank's tokens they compute as
        much as this rank's experts with the tokens of all ranks.
        """
        made = build()
        _cut(made, mesh, with_experts=False)
        return made

    try:
        with torch.device("meta"):
            made = build()
        of_experts = _cut(made, mesh, with_experts=mesh.expert > 1)
        blocks = _blocks_of(made)
        if mesh.pipeline > 1:
            blocks = _heaviest_stage(made, blocks, mesh.pipeline)
    except ParameterError as error:
        raise MemoryPlanError(f"{model.name}: {error}") from None
    except (Exception, SystemExit) as error:
        raise MemoryPlanError(f"{model.name} cannot be split: {described(error)}") from error
    held = [parameter for block in blocks for parameter in block]
    return replace(
        model,
        blocks=_numels(blocks, trainable=True),
        frozen_blocks=_numels(blocks, trainable=False),
        experts=sum(p.numel() for p in held if p.requires_grad and id(p) in of_experts),
        build=shared,
    )


def _cut(model: nn.Module, mesh: MeshShape, *, with_experts: bool) -> set[int]:
    """Leave a model the parts of rank 0, and let it compute with them where experts are whole; return the
    ids of the parameters of experts.
    """
    comm: Any = SimpleNamespace(mesh=mesh, rank=0, experts=with_experts)
    work = Decision(model, find_plan(model, None) if mesh.tensor > 1 else {}, _OneRankAxis(comm))
    work.decide()
    if with_experts:
        work.decide_on_experts(Axis(comm, "expert"), None)
    of_experts = {} if work.experts is None else work.experts.boxes
    boxes = {**work.boxes, **of_experts}
    for parameter in model.parameters():
        if id(parameter) in boxes:
            parameter.data = parameter.detach().new_empty(box_shape(boxes[id(parameter)][0]))
    if not with_experts:
        for name, forward in work.forwards.items():
            forward.name = name
            work.modules[name].forward = forward
        for module, key, value in work.settings:
            setattr(module, key, value)
    return set(of_experts)


def _heaviest_stage(model: nn.Module, blocks: Blocks, stages: int) -> Blocks:
    """Return the blocks of the stage that has most."""
    name, layers = find_layers(model)
    sequence = LayerSequence(model, name, layers, stages)
    sequence.bounds = divide(weights_of(model, layers), stages, "best")
    owners = owners_of(sequence)
    found = list[Blocks]()
    for stage in range(stages):
        root, *rest = ([p for p in block if stage in owners[id(p)]] for block in blocks)
        found.append([root, *filter(None, rest)])
    return max(found, key=lambda own: sum(p.numel() for block in own for p in block))


def _of_numbers(model: ModelSizes, mesh: MeshShape) -> ModelSizes:
    root, *blocks = (-(-block // mesh.tensor) for block in model.blocks)
    if mesh.expert > 1:
        raise MemoryPlanError(
            "sizes alone do not tell which parameters belong to experts: pass MODEL or --hf_config"
        )
    if mesh.pipeline > 1 and model.layers is None:
        raise MemoryPlanError(
            "the size of a pipeline stage depends on the layers: pass --hidden and --layers"
        )
    if model.hidden is not None and model.layers is not None:
        if mesh.pipeline > model.layers:
            raise MemoryPlanError(f"cannot split {model.layers} layers into {mesh.pipeline} pipeline stages")
        parts = _parts_of_layer(-(-model.hidden * model.hidden // mesh.tensor))
        blocks = parts * -(-model.layers // mesh.pipeline)
    # the words may be needed at both ends
    return replace(model, blocks=(root, *blocks))
