"""LAMB is not here."""

from zlaunch.compat.deepspeed.missing import missing_class

FusedLamb = missing_class("ops.lamb.FusedLamb", "it needs whole matrices; use AdamW")
