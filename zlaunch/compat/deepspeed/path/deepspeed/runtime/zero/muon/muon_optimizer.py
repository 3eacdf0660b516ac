"""Muon under DeepSpeed's name."""

from zlaunch.compat.deepspeed.optimizers import MuonWithAuxAdam as MuonWithAuxAdam
