"""A folder for ``sys.path``; see ``zlaunch.compat.deepspeed``."""
