"""The ``deepspeed`` command is ``zlaunch``."""

from . import runner as runner
