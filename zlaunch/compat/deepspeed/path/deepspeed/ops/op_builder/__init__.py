"""Nothing is built: kernels are compiled by NVRTC when they are first used."""

from zlaunch.compat.deepspeed.optimizers import (
    OPERATIONS,
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    FusedLambBuilder,
    FusedLionBuilder,
    UtilsBuilder,
)
