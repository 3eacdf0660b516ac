"""Mixture of experts is not here."""

from . import layer as layer
from . import utils as utils
