"""Chooses the dtype of each floating-point buffer of a model that trains in 16 bits.

A buffer keeps its dtype, as with DeepSpeed: rounded frequencies of rotary positions turn a far position by a
wrong angle, and a rounded routing bias sends tokens to other experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..errors import UnsupportedError
from .policy import dtype_named

if TYPE_CHECKING:
    from ..config import Config

_HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}
_MISMATCH = re.compile(
    r"same dtype|expected scalar type|mixed dtype|dtypes? match|dtypes must|should be the same|"
    r"does not match weight dtype|self\.dtype to be equal"
)
"""Matches what torch says where an operation is given tensors of two dtypes."""


@dataclass(frozen=True, slots=True)
class BufferTypes:
    """Chooses the dtype of each buffer of a model."""

    trained: torch.dtype | None
    """Names the dtype that parameters are converted to; None leaves them as they are."""
    chosen: torch.dtype | None = None
    """Names the dtype of all buffers (``data_types.buffer_dtype``); None leaves them as they are."""
    listed: tuple[str, ...] | None = None
    """Lists patterns of names that stay in fp32; None takes those that a transformers model itself lists."""

    def of(self, module: nn.Module, name: str, buffer: Tensor) -> torch.dtype:
        """Return the dtype of a buffer of ``module`` that no list names."""
        if not buffer.is_floating_point():
            return buffer.dtype
        if self.chosen is not None:
            return self.chosen
        mixes = self.trained is None or not _meets_parameters(module, name)
        return buffer.dtype if mixes else self.trained or buffer.dtype

    def kept_in_fp32(self, model: nn.Module) -> set[int]:
        """Return the ids of the buffers that stay in fp32."""
        return {id(buffer) for _, buffer in self._named(model, model.named_buffers(remove_duplicate=False))}

    def keep(self, module: nn.Module) -> None:
        """Convert buffers that ``module``, which has just been built, lists to fp32, in place."""
        if self.listed or self._own_list(module):
            for _, buffer in self._named(module, module.named_buffers()):
                buffer.data = buffer.data.float()

    def rounded_parameters(self, model: nn.Module) -> list[str]:
        """Return the names of parameters that the list names, and that are rounded nevertheless."""
        return [name for name, _ in self._named(model, model.named_parameters())]

    def unmatched(self, model: nn.Module) -> list[str]:
        """Return the patterns of the config's list that no name of a parameter or buffer matches."""
        names = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        patterns = self.listed or ()
        return [each for each in patterns if not any(re.search(_glob(each), name) for name in names)]

    def _named(self, model: nn.Module, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        pattern = self._pattern(model)
        if pattern is not None:
            yield from (
                (name, each) for name, each in tensors if each.is_floating_point() and pattern.search(name)
            )

    def _pattern(self, model: nn.Module) -> re.Pattern[str] | None:
        """Return what names that stay in fp32 match, by transformers' rules; None where there are none."""
        if self.trained not in _HALF:
            return None
        if self.listed is not None:
            found = {_glob(name) for name in self.listed}
        else:
            found = {
                rf"^{re.escape(prefix)}\..*{_glob(name)}" if prefix else _glob(name)
                for prefix, module in model.named_modules()
                for name in self._own_list(module)
            }
        return re.compile("|".join(sorted(found))) if found else None

    def _own_list(self, module: nn.Module) -> set[str]:
        """Return the names that a transformers model lists: some count under fp16 alone."""
        names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        if self.trained is torch.float16:
            names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
        return names


def choose_buffer_types(config: Config, trained: torch.dtype | None) -> BufferTypes:
    """Return what a validated config asks for."""
    section = config.data_types
    listed = section.keep_in_fp32_modules
    return BufferTypes(trained, dtype_named(section.buffer_dtype), None if listed is None else tuple(listed))


def explained(
    error: BaseException, model: nn.Module, inputs: Iterable[Tensor], trained: torch.dtype | None
) -> UnsupportedError | None:
    """Return an error that says what to do where two dtypes met, and an input or a buffer may be why; None
    for others.
    """
    if trained not in _HALF or not isinstance(error, RuntimeError) or not _MISMATCH.search(str(error)):
        return None
    short = _HALF[trained]
    wide = [each.dtype for each in inputs if each.is_floating_point() and each.dtype != trained]
    if wide:
        return UnsupportedError(
            f"{error}. An input of the model is {wide[0]}, but the parameters are in {short}: convert it "
            f'(x.to({trained})), or train in fp32 with "torch_autocast", which casts inputs'
        )
    others = [n for n, b in model.named_buffers() if b.is_floating_point() and b.dtype != trained]
    if not others:
        return None
    return UnsupportedError(
        f"{error}. The parameters are in {short}, but the buffer {others[0]} is "
        f"{model.get_buffer(others[0]).dtype} (its own dtype, or data_types in the config). Cast values "
        f'computed from it to {short}, or set "data_types": {{"buffer_dtype": "{short}"}}, which '
        "rounds all buffers except keep_in_fp32_modules"
    )


def _glob(name: str) -> str:
    return name.replace("*", ".*")


def _meets_parameters(module: nn.Module, name: str) -> bool:
    """Tell whether torch's own code passes a buffer and a parameter to one operation, which refuses two
    dtypes: running statistics beside a weight, and the vectors of a spectral norm.
    """
    if isinstance(module, _NormBase):
        return bool(module.affine)
    if isinstance(module, _SpectralNorm):
        return True
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(h, SpectralNorm) and name in (f"{h.name}_u", f"{h.name}_v") for h in hooks)
