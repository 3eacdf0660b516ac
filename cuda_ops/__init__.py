"""CUDA kernels (CuPy, compiled at run time) for steps and communication, each with a torch twin.

``step``: one optimizer step over a flat shard; ``norm``: its norm and multiplier; ``loss_scale``: the
scaler on the device; ``quantize``: block quantisation of what ranks send. ``loader.set_mode`` chooses
between kernels and twins; CuPy is imported when the first kernel is needed, numba when the CPU first needs
one of its own.
"""
