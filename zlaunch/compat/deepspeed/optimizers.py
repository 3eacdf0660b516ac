"""DeepSpeed's optimizer classes: calling one makes the torch optimizer of that rule.

The engine steps it on flat shards with its own kernels, on the GPU or, offloaded, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from zlaunch import optim
from zlaunch.compat.deepspeed.missing import NotInZlaunch, absent
from zlaunch.optim import Lamb, Lion, UncorrectedAdam
from zlaunch.runtime.script.optimizer import ZeroOptimizer
from zlaunch.runtime.zero.placeholder import MASTERS

# -- optimizers -------------------------------------------------------------------------------------


class _Maker(type):
    """Calls make, ``isinstance`` asks, for the torch optimizers in ``kinds``."""

    kinds: tuple[type, ...] = ()

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kinds)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.make(*args, **kwargs)  # type: ignore[attr-defined]


class FusedAdam(metaclass=_Maker):
    """Adam, with decoupled weight decay unless ``adam_w_mode`` is False."""

    kinds = (torch.optim.Adam, torch.optim.AdamW, UncorrectedAdam)

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the torch optimizer. Raises ValueError for what would be another rule."""
        if not bias_correction:
            _refuse("Adam without bias correction", amsgrad=amsgrad)
            rates = (betas[0], betas[1])
            return UncorrectedAdam(params, lr, rates, eps, weight_decay, decoupled=adam_w_mode)
        kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
        return kind(
            params,
            lr=lr,
            betas=tuple(betas),  # type: ignore[arg-type]
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
        )


class DeepSpeedCPUAdam(metaclass=_Maker):
    """Adam with DeepSpeed's other spelling of the argument: ``adamw_mode``."""

    kinds = (torch.optim.Adam, torch.optim.AdamW, UncorrectedAdam)

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the torch optimizer. Raises ValueError for what would be another rule."""
        _refuse_groups_of_others(model_params)
        return FusedAdam.make(
            model_params, lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        )


class FusedLamb(metaclass=_Maker):
    """LAMB. Its bias is corrected in the moments, as in the paper, not in the length of the step."""

    kinds = (Lamb,)

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer. Raises ValueError for what would be another rule."""
        _refuse("Lamb", max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        return Lamb(
            params,
            lr,
            (betas[0], betas[1]),
            eps,
            weight_decay,
            bias_correction=bias_correction,
            min_coeff=min_coeff,
            max_coeff=max_coeff,
            eps_inside_sqrt=eps_inside_sqrt,
        )


def _refuse(kind: str, **given: Any) -> None:
    """Raise ValueError for arguments that would be another rule."""
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}={value} is not supported by {kind}")


_NOT_ADAMS = {"momentum", "dampening", "centered", "lr_decay", "rho", "etas", "lambd", "momentum_decay"}
_NOT_ADAMS |= {"beta2_decay", "scale_parameter"}
"""Keys of param groups: SGD's, RMSprop's, Adagrad's, Adadelta's, Rprop's, ASGD's, NAdam's and Adafactor's."""


def _refuse_groups_of_others(groups: Any) -> None:
    """Raise ValueError for param groups that another optimizer has made.

    With offload_optimizer, accelerate passes the groups of any optimizer to DeepSpeedCPUAdam. Adam with the
    rate of SGD would train, and wrongly.
    """
    if not isinstance(groups, list):
        return
    found = sorted({key for group in groups if isinstance(group, dict) for key in _NOT_ADAMS & group.keys()})
    if found:
        raise ValueError(
            f"DeepSpeedCPUAdam got the param groups of another optimizer: they have {', '.join(found)}. With "
            "offload_optimizer, accelerate replaces every optimizer by Adam. To keep yours, set "
            '"zero_force_ds_cpu_optimizer": false in the config'
        )


class OnebitAdam(metaclass=_Maker):
    """1-bit Adam."""

    kinds = (optim.OneBitAdam,)

    @staticmethod
    def make(
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer. Raises ValueError for what would be another rule."""
        _refuse("OneBitAdam", eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        rates: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return optim.OneBitAdam(params, freeze_step=freeze_step, **rates)


class OnebitLamb(metaclass=_Maker):
    """1-bit LAMB."""

    kinds = (optim.OneBitLamb,)

    @staticmethod
    def make(
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer. Raises ValueError for what would be another rule."""
        _refuse("OneBitLamb", eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        options |= {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        return optim.OneBitLamb(params, freeze_step=freeze_step, **options)


class ZeroOneAdam(metaclass=_Maker):
    """0/1 Adam."""

    kinds = (optim.ZeroOneAdam,)

    @staticmethod
    def make(
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Sequence[float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer. Raises ValueError for what would be another rule."""
        _refuse("ZeroOneAdam", eps_inside_sqrt=eps_inside_sqrt, max_grad_norm=max_grad_norm, amsgrad=amsgrad)
        rates: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        return optim.ZeroOneAdam(
            params,
            var_freeze_step=var_freeze_step,
            var_update_scaler=var_update_scaler,
            local_step_scaler=local_step_scaler,
            local_step_clipper=local_step_clipper,
            **rates,
        )


class MuonWithAuxAdam(metaclass=_Maker):
    """Muon for groups with ``use_muon``, AdamW for the others."""

    kinds = (optim.Muon,)

    @staticmethod
    def make(param_groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the runtime's optimizer, with the defaults of the package ``muon``. Raises ValueError for a
        group without ``use_muon``, or with another key.
        """
        groups = []
        for index, group in enumerate(param_groups):
            if "use_muon" not in group:
                raise ValueError(f"MuonWithAuxAdam: param group {index} has no use_muon")
            muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
            adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
            given = {**(muon if group["use_muon"] else adam), **group}
            unknown = given.keys() - (muon if group["use_muon"] else adam) - {"params", "use_muon"}
            if unknown:
                raise ValueError(f"MuonWithAuxAdam: param group {index} has {', '.join(sorted(unknown))}")
            if not group["use_muon"]:
                given["adam_eps"] = given.pop("eps")
            groups.append(given)
        return optim.Muon(groups)


class FusedLion(metaclass=_Maker):
    """Lion."""

    kinds = (Lion,)

    @staticmethod
    def make(
        params: Any,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer."""
        return Lion(params, lr=lr, betas=tuple(betas), weight_decay=weight_decay)  # type: ignore[arg-type]


class DeepSpeedCPULion(metaclass=_Maker):
    """Lion, under the name for the CPU."""

    kinds = (Lion,)

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-3,
        betas: Sequence[float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the runtime's optimizer."""
        return FusedLion.make(model_params, lr, betas, weight_decay)


class DeepSpeedCPUAdagrad(metaclass=_Maker):
    """Adagrad."""

    kinds = (torch.optim.Adagrad,)

    @staticmethod
    def make(
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """Make the torch optimizer."""
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


# -- optimizer --------------------------------------------------------------------------------------
#
# What ``deepspeed.initialize`` returns second, and its bases.


_unknown = absent("engine.optimizer")


class DeepSpeedOptimizer(torch.optim.Optimizer):
    """Base class, for ``isinstance``."""


class _Hooks:
    """A list of hooks to remove, and the way to put them back. It is empty: a parameter that
    ``GatheredParameters`` holds is not touched by ours.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: the hooks have stayed."""


class ZeROOptimizer(ZeroOptimizer, DeepSpeedOptimizer):
    """The engine's optimizer as DeepSpeed scripts see it, with DeepSpeed's further members.

    Attributes
        overflow: whether the last step was skipped.
        loss_scale, cur_scale: what losses are multiplied with.
    """

    _engine: Any  # the whole engine, whose state these members show

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _unknown(name)

    @property
    def optimizer(self) -> ZeROOptimizer:
        """Return itself: there is one optimizer, not one inside another."""
        return self

    @property
    def overflow(self) -> bool:
        """Tell whether the last step left everything as it was, because gradients were not finite."""
        return bool(self._engine.overflow)

    @property
    def loss_scale(self) -> float:
        """Return the loss scale: 1 but for fp16."""
        return float(self._engine._scaler.scale)

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Tell whether this is fp16 with a scale that adapts."""
        return bool(self._engine._scaler.dynamic)

    @property
    def fp32_partitioned_groups_flat(self) -> list[Tensor]:
        """Copy this rank's masters, a flat tensor a param group."""
        step = self._engine._shard_step
        assert step is not None
        self._engine._check_states("fp32_partitioned_groups_flat", MASTERS)
        return [
            torch.cat([leaf.detach().reshape(-1) for leaf in group["params"]])
            if group["params"]
            else torch.empty(0)
            for group in step.optimizer.param_groups
        ]

    single_partition_of_fp32_groups = fp32_partitioned_groups_flat

    @property
    def parameter_offload(self) -> _Hooks:
        """Return what scripts take the hooks from around a generation, inside GatheredParameters; stage 3
        only.
        """
        if self._engine.zero_optimization_stage() < 3:
            raise AttributeError("parameter_offload: parameters are sharded only at stage 3")
        return _Hooks(self._engine.module)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Call the engine's backward."""
        self._engine.backward(loss, retain_graph=retain_graph)


class ZeRORuntimeException(Exception):
    """DeepSpeed's error for what ZeRO cannot do; ours have classes of their own."""


class _Precision(type):
    """Answers ``isinstance`` for the engine's optimizer, by the engine's precision and stage."""

    dtype: torch.dtype
    stages: tuple[int, ...]

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, ZeROOptimizer):
            return False
        engine = instance._engine
        enabled = engine.fp16_enabled() if cls.dtype is torch.float16 else engine.bfloat16_enabled()
        return bool(enabled) and engine.zero_optimization_stage() in cls.stages

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__name__} is made by deepspeed.initialize: give it the model and config"
        )


class FP16_Optimizer(metaclass=_Precision):
    """The optimizer of an engine with fp16 and no ZeRO."""

    dtype = torch.float16
    stages = (0,)


class FP16_UnfusedOptimizer(metaclass=_Precision):
    """DeepSpeed's other class for that: no optimizer here is one."""

    dtype = torch.float16
    stages = ()


class BF16_Optimizer(metaclass=_Precision):
    """The optimizer of an engine with bf16 and gradients that are not sharded."""

    dtype = torch.bfloat16
    stages = (0, 1)


# -- builders ---------------------------------------------------------------------------------------
#
# ``deepspeed.ops.op_builder``: scripts ask these for a name and whether an operation is there.


class OpBuilder:
    """An operation of DeepSpeed's; ours need no building."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Tell whether the runtime does what the operation is for."""
        return True

    def load(self, verbose: bool = True) -> NoReturn:
        """Refuse: there is no extension module."""
        raise NotInZlaunch(f"no extension {self.NAME!r}: zlaunch has its own kernels and needs no build")

    def builder(self) -> NoReturn:
        """Refuse: there is nothing to build."""
        self.load()

    def absolute_name(self) -> str:
        """Name the place where DeepSpeed would have the operation."""
        return f"deepspeed.ops.{self.NAME}_op"


class AsyncIOBuilder(OpBuilder):
    """Stands for access to disks beside training."""

    NAME = "async_io"


class CPUAdamBuilder(OpBuilder):
    """Stands for Adam on the host."""

    NAME = "cpu_adam"


class CPUAdagradBuilder(OpBuilder):
    """Stands for Adagrad on the host."""

    NAME = "cpu_adagrad"


class CPULionBuilder(OpBuilder):
    """Stands for Lion on the host."""

    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    """Stands for Adam in one kernel."""

    NAME = "fused_adam"


class FusedLionBuilder(OpBuilder):
    """Stands for Lion in one kernel."""

    NAME = "fused_lion"


class FusedLambBuilder(OpBuilder):
    """Stands for LAMB in one kernel, which zlaunch lacks."""

    NAME = "fused_lamb"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return False."""
        return False


class UtilsBuilder(OpBuilder):
    """Stands for flattening tensors."""

    NAME = "utils"


OPERATIONS = {
    **{
        builder.NAME: builder().is_compatible()
        for builder in (
            AsyncIOBuilder,
            CPUAdamBuilder,
            CPUAdagradBuilder,
            CPULionBuilder,
            FusedAdamBuilder,
            FusedLionBuilder,
            FusedLambBuilder,
            UtilsBuilder,
        )
    },
    "transformer": False,
    "stochastic_transformer": False,
    "transformer_inference": False,
    "inference_core_ops": False,
    "ragged_ops": False,
    "random_ltd": False,
    "quantizer": False,
    "fp_quantizer": False,
    "sparse_attn": False,
    "spatial_inference": False,
    "evoformer_attn": False,
    "gds": False,
    "deep_compile": False,
}
"""DeepSpeed's operations, and whether the runtime does what each is for."""
