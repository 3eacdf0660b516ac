"""Attention over sequences of which each rank has a part."""

from zlaunch.compat.deepspeed.missing import absent as _absent
from zlaunch.compat.deepspeed.sequence_layer import DistributedAttention, apply_rotary_pos_emb

__getattr__ = _absent("deepspeed.sequence.layer")
