"""The runtime that each worker runs: ZeRO, mixed precision, optimizers. Imported as ``zlaunch.runtime``.

Works alike under zlaunch, torchrun, srun or a notebook; never imports the launcher.
"""
