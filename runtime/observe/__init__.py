"""What is measured and reported of a training: times, metrics, trackers, collectives, operations.

Read ``clock`` (times of a step's parts), ``reporter`` (reports to the launcher) and ``trackers``
(TensorBoard, CSV, Weights & Biases, Comet). ``breakdown``, ``comms_logger`` and ``flops_profiler`` are
sections of the config; ``limits`` measures what a rank can reach.
"""
