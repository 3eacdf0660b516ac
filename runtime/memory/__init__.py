"""The memory and time of a training, estimated before anything is allocated.

Read ``estimate`` (arithmetic alone), ``model`` (sizes of a model), ``activations``, ``preflight`` (what
the machine has) and ``advice`` (after an out-of-memory error). ``choices`` compares settings,
``fake_step`` measures a model without its memory, ``step_time`` bounds the time of a step.
"""
