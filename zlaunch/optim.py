"""Optimizers that torch does not have, or not in all versions: ``zlaunch.optim``.

They are torch optimizers: give :func:`zlaunch.initialize` one of them, or name it in the config. Outside of
an engine ``step()`` works on whole parameters.
"""

from zlaunch.runtime.optim.lamb import Lamb
from zlaunch.runtime.optim.lion import Lion
from zlaunch.runtime.optim.muon import Muon
from zlaunch.runtime.optim.one_bit import OneBitAdam, OneBitLamb, ZeroOneAdam
from zlaunch.runtime.optim.uncorrected_adam import UncorrectedAdam

__all__ = ["Lamb", "Lion", "Muon", "OneBitAdam", "OneBitLamb", "UncorrectedAdam", "ZeroOneAdam"]
