"""What the script holds: checks of its model and optimizer, and classes that lead to the engine.

Read ``accept`` (at the start), ``handles`` (at each step), ``optimizer`` (the class of the script's
optimizer), ``module_methods``, ``construct`` (``zero.Init``), and ``tiled_linear``.
"""
