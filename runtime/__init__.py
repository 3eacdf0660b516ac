"""The runtime that each worker runs: ZeRO, mixed precision, optimizers. Imported as ``zlaunch.runtime``.

It works the same under zlaunch, torchrun, srun or a notebook; it never imports the launcher.
"""
