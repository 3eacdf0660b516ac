"""Optimizers that torch does not have, or not in all versions: ``zlaunch.optim``.

They are torch optimizers: give :func:`zlaunch.initialize` one of them, or name it in the config. Outside of
an engine ``step()`` works on whole parameters.
"""

from zlaunch.runtime.collective_step.lamb import Lamb
from zlaunch.runtime.collective_step.muon import Muon
from zlaunch.runtime.one_bit.optimizers import OneBitAdam, OneBitLamb, ZeroOneAdam
from zlaunch.runtime.registry.lion import Lion
from zlaunch.runtime.registry.uncorrected_adam import UncorrectedAdam

__all__ = ["Lamb", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "UncorrectedAdam", "ZeroOneAdam"]
