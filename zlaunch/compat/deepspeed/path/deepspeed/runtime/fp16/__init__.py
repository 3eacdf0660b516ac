"""Loss scaling."""

from . import loss_scaler as loss_scaler
from . import onebit as onebit
