"""Mixture of experts is not here."""

from zlaunch.compat.deepspeed.missing import EXPERTS, missing_class

MoE = missing_class("moe.layer.MoE", EXPERTS)
