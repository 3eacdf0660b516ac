"""All decisions of a launch, made before anything is started: options, environment, and the plan as data.

Read ``options``, ``checks`` and ``plan``. ``world_sizes`` has the numbers of workers that failures may
leave.
"""
