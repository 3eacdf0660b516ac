"""Chooses from the config how a model computes: in fp16, bf16 or fp32, and under torch.autocast or not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

from ..cuda_ops.loss_scale import LossScaleState, update_loss_scale
from .comm.collectives import Comm
from .config import Config
from .errors import LossScaleFloorError, UnsupportedError
from .log import say

# -- step result ------------------------------------------------------------------------------------
#
# Keeps the numbers of one optimizer step, and sends them to the host.


class StepResult:
    """Keeps what a step did. On a GPU the numbers are on their way to the host; reading waits for them."""

    def __init__(
        self,
        norm: float | Tensor,
        skipped: bool | Tensor,
        stop: float | Tensor,
        differs: bool | Tensor = False,
        *,
        extra_stats: Sequence[float] | Tensor,
    ) -> None:
        self._facts = (norm, skipped, stop, differs)
        self.extra_stats = extra_stats
        """Sums of the step's extra statistics over the ranks, on the device if the host has not waited for
        the step.
        """
        self._values: tuple[float, ...] | None = None
        self._host: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        if not isinstance(norm, Tensor):
            self._values = norm, float(skipped), float(stop), float(differs), 0.0

    def send(self, stuck: Tensor | None) -> None:
        """Start to copy the numbers to the host, and with them whether the loss scale cannot shrink."""
        if self._values is not None or self._host is not None:
            return
        device = self._facts[0].device  # type: ignore[union-attr]
        stuck = torch.zeros((), device=device) if stuck is None else stuck
        values = torch.stack([torch.as_tensor(fact).double() for fact in (*self._facts, stuck)])
        if device.type != "cuda":
            self._host = values
            return
        self._host = torch.empty(5, dtype=torch.float64, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def _read(self) -> tuple[float, ...]:
        if self._values is None:
            if self._host is None:
                self.send(None)
            if self._event is not None:
                self._event.synchronize()
            assert self._host is not None
            self._values = tuple(self._host.tolist())
        return self._values

    @property
    def norm(self) -> float:
        """Return the norm of the averaged, unscaled gradient before clipping."""
        return self._read()[0]

    @property
    def skipped(self) -> bool:
        """Tell whether the step was skipped: its gradients were checked and not finite."""
        return self._read()[1] > 0

    @property
    def stop(self) -> bool:
        """Tell whether some rank has been asked to save and stop; equal on all ranks."""
        return self._read()[2] > 0

    @property
    def differs(self) -> bool:
        """Tell whether the ranks have used the model in different orders; the step then changed nothing."""
        return self._read()[3] > 0

    @property
    def stuck(self) -> bool:
        """Tell whether gradients overflowed at the smallest loss scale."""
        return self._read()[4] > 0

    @property
    def skipped_flag(self) -> bool | Tensor:
        """Return ``skipped`` where it is: 0 or 1 on the device, or a bool that is known."""
        return self._facts[1]

    @property
    def norm_there(self) -> float | Tensor:
        """Return ``norm`` where it is: 0-dim on the device, or a number that is known."""
        return self._facts[0]

    @property
    def known(self) -> bool:
        """Tell whether the numbers can be read without a wait."""
        return self._values is not None


# -- loss scaler ------------------------------------------------------------------------------------
#
# Scales losses, statically or dynamically, for fp16.
#
# The dynamic rule is that of "Mixed Precision Training" (Micikevicius et al., 2018) with the hysteresis of
# Megatron and DeepSpeed: a few overflows are tolerated before the scale shrinks.


def floor_error(min_scale: float, names: Sequence[str] = ()) -> LossScaleFloorError:
    """Build the error; ``names`` are the parameters whose gradients overflow."""
    more = " ..." if len(names) > 10 else ""
    which = f"Affected parameters: {', '.join(names[:10])}{more}. " if names else ""
    return LossScaleFloorError(
        f"gradients overflow at the minimum loss scale, {min_scale:g}: the model itself produces inf or "
        f"NaN. {which}Try bf16 or a lower learning rate, or check the input data"
    )


@dataclass(slots=True)
class LossScaler:
    """Keeps the factor that the loss is multiplied with.

    ``scale`` is the factor of the *current* gradients; call :meth:`update` only after they have been unscaled
    with it.
    """

    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    """Counts the steps without overflow after which the scale doubles."""
    min_scale: float = 1.0
    hysteresis: int = 2
    """Counts the overflows that are tolerated before the scale is halved."""
    consecutive_hysteresis: bool = False
    """Refill the hysteresis after every good step, not only when the scale grows."""
    _left: int = field(init=False)
    _step: int = field(init=False, default=0)
    _last_overflow: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self._left = self.hysteresis

    @property
    def factor(self) -> float:
        """Return the factor that the loss is multiplied with."""
        return self.scale

    @property
    def used(self) -> bool:
        """Tell whether losses are scaled at all."""
        return self.dynamic or self.scale != 1.0

    def update(self, result: StepResult) -> None:
        """Count one optimizer step. Raises LossScaleFloorError if the scale can shrink no further."""
        # only a dynamic scale depends on it: on a GPU, asking waits for the step
        self.note(self.dynamic and result.skipped)

    def note(self, overflow: bool) -> None:
        """Count one optimizer step by whether it overflowed."""
        if self.dynamic:
            if overflow:
                self._shrink()
            else:
                self._maybe_grow()
        self._step += 1

    def _shrink(self) -> None:
        if self._left <= 1:
            if self.scale <= self.min_scale:
                raise floor_error(self.min_scale)
            self.scale = max(self.scale / 2.0, self.min_scale)
        else:
            self._left -= 1
        self._last_overflow = self._step

    def _maybe_grow(self) -> None:
        if self.consecutive_hysteresis:
            self._left = self.hysteresis
        since = self._step - self._last_overflow - 1
        if since > 0 and since % self.window == 0:
            if not self.consecutive_hysteresis:
                self._left = self.hysteresis
            self.scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, enough to go on exactly."""
        return {
            "scale": self.scale,
            "left": self._left,
            "step": self._step,
            "last_overflow": self._last_overflow,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self.scale = float(state["scale"])
        self._left = int(state["left"])
        self._step = int(state["step"])
        self._last_overflow = int(state["last_overflow"])


class DeviceLossScaler:
    """Scales the loss by LossScaler's dynamic rule with the state on the device: no step waits for it."""

    dynamic = used = True

    def __init__(self, scaler: LossScaler, device: torch.device) -> None:
        self.min_scale = scaler.min_scale
        self._state = LossScaleState(
            device,
            scale=scaler.scale,
            window=scaler.window,
            min_scale=scaler.min_scale,
            hysteresis=scaler.hysteresis,
            consecutive_hysteresis=scaler.consecutive_hysteresis,
        )

    @property
    def factor(self) -> Tensor:
        """Return the factor that the loss is multiplied with: 0-dim fp32 on the device."""
        return self._state.scale

    @property
    def scale(self) -> float:
        """Return the factor as a number; waits for the device."""
        return float(self._state.scale)

    def update(self, result: StepResult) -> None:
        """Count one optimizer step; the result's numbers tell whether the scale can shrink."""
        flag = result.skipped_flag
        update_loss_scale(self._state, flag if isinstance(flag, Tensor) else float(flag))
        result.send(self._state.at_floor)
        if result.known and self._state.at_floor:
            raise floor_error(self.min_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what LossScaler's does; waits for the device."""
        return dict(self._state.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._state.load_state_dict(state)


# -- policy -----------------------------------------------------------------------------------------


_DTYPES = {
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float": torch.float32,
}


def dtype_named(name: str | None) -> torch.dtype | None:
    """Return the torch dtype behind a name of the config; None stays None."""
    return None if name is None else _DTYPES[name]


@dataclass(frozen=True, slots=True)
class Precision:
    """Says how a model computes."""

    dtype: torch.dtype | None
    """Names the dtype that floating-point parameters are converted to; None leaves them as they are."""
    scaler: LossScaler
    cast_inputs: bool
    check_finite: bool
    """Tells whether to skip a step whose gradients are not finite."""
    narrow_masters: bool = False
    """Tells that master values have ``dtype``, and are rounded at random."""
    autocast: torch.dtype | None = None
    """Names the dtype of torch.autocast in forward passes of the engine; None leaves the script's own."""

    def around_forward(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass on a device."""
        if self.autocast is None:
            return nullcontext()
        # The cache would hold copies of weights that stage 3 frees, and one made without gradients, by a
        # reentrant checkpoint, would be used where gradients are needed.
        return torch.autocast(device.type, self.autocast, cache_enabled=False)


def choose_precision(config: Config) -> Precision:
    """Return the precision that a validated config asks for."""
    if config.fp16.enabled:
        fp16 = config.fp16
        dynamic = fp16.loss_scale == 0
        scaler = LossScaler(
            scale=2.0**fp16.initial_scale_power if dynamic else float(fp16.loss_scale),
            dynamic=dynamic,
            window=int(fp16.loss_scale_window),
            min_scale=float(fp16.min_loss_scale) or torch.finfo(torch.float32).tiny,
            hysteresis=int(fp16.hysteresis),
            consecutive_hysteresis=fp16.consecutive_hysteresis,
        )
        return Precision(torch.float16, scaler, fp16.auto_cast, True)
    if config.bf16.enabled:
        return Precision(
            dtype=torch.bfloat16,
            scaler=LossScaler(),
            cast_inputs=config.bf16.auto_cast,
            check_finite=config.bf16.check_grad_overflow,
            narrow_masters=config.bf16.master_weights == "stochastic",
            autocast=dtype_named(config.autocast[0]),
        )
    name, scale, floor = config.autocast
    # a dynamic scale has the numbers of torch.amp.GradScaler
    scaler = LossScaler(scale) if scale else LossScaler(max(2.0**16, floor), True, 2000, floor, 1)
    check = scaler.used or name == "fp16"
    return Precision(None, scaler, False, check, autocast=dtype_named(name))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Convert the floating-point tensors in tuples, lists and mappings; return other values unchanged, also
    tensors in 8 bits.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.itemsize > 1 else value
    if isinstance(value, tuple):
        items = [cast_floats(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [cast_floats(item, dtype) for item in value]
    if type(value) is dict:
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    if isinstance(value, MutableMapping):  # such as OrderedDict, or a BatchEncoding of transformers
        found = copy(value)
        for key, item in value.items():
            found[key] = cast_floats(item, dtype)
        return found
    return value


# -- numerics ---------------------------------------------------------------------------------------
#
# Settles how a process computes: the precision of a config, TF32, and what is said of both at the start.


def settle_precision(config: Config, comm: Comm) -> Precision:
    """Return the precision that a validated config asks for, and set TF32 for this process where it has
    ``tf32``. Rank 0 says what runs in the place of apex, and where ``tf32`` can do nothing.
    """
    precision = choose_precision(config)
    said = []
    if config.amp.enabled:
        what = "plain fp32" if precision.autocast is None else "torch.autocast to float16 (torch_autocast)"
        scale = "without loss scaling"
        if precision.scaler.used:
            scale = f"with a {'dynamic' if precision.scaler.dynamic else 'fixed'} loss scale"
        said.append(f"amp: zlaunch does not use apex; {config.amp.opt_level} becomes {what} {scale}")
    if config.tf32 is not None:
        if comm.device.type == "cuda" and torch.cuda.get_device_capability(comm.device) >= (8, 0):
            set_tf32(config.tf32)
        else:
            said.append("tf32 has no effect: it needs a GPU of compute capability 8.0 or higher")
    if comm.rank == 0:
        for line in said:
            say(line)
    return precision


def set_tf32(enabled: bool) -> None:
    """Let fp32 products and convolutions on GPUs round their inputs to TF32, or not.

    Newer versions of torch have a flag for each operation beside the old ones, and refuse to read either kind
    where the two differ: all are set. The one for all operations at once stays, as these go before it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions call the old flags deprecated
        torch.set_float32_matmul_precision("high" if enabled else "highest")
        torch.backends.cudnn.allow_tf32 = enabled
    for operation in ("conv", "rnn"):
        # where it is off, the old flag leaves these to the one for all
        flag: Any = getattr(torch.backends.cudnn, operation, None)
        if hasattr(flag, "fp32_precision"):  # older versions have a module called rnn
            flag.fp32_precision = "tf32" if enabled else "ieee"


# -- buffers ----------------------------------------------------------------------------------------
#
# Chooses the dtype of each floating-point buffer of a model that trains in 16 bits.
#
# A buffer keeps its dtype, as with DeepSpeed: rounded frequencies of rotary positions turn a far position
# by a
# wrong angle, and a rounded routing bias sends tokens to other experts.


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
