"""Optimizers by DeepSpeed's names, and which of its operations there are."""

from . import adagrad as adagrad
from . import adam as adam
from . import aio as aio
from . import lamb as lamb
from . import lion as lion
from . import op_builder as op_builder

__compatible_ops__ = op_builder.OPERATIONS
