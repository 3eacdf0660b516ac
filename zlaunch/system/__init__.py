"""What zlaunch asks of the operating system: processes, devices, networks. No torch.

Read ``processes`` (find and end the processes of a run), ``events`` (what agents and launchers send),
``machine`` (slots and facts), ``network``, ``checkup`` and ``gpu_health``.
"""
