"""Mixture of experts is not here."""

from zlaunch.compat.deepspeed.missing import missing_class

MoE = missing_class("moe.layer.MoE", "use the model's own experts; ZeRO shards them as any other parameters")
