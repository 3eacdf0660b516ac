"""Mixture of experts is not here."""

from . import layer as layer
