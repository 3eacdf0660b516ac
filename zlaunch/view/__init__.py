"""What a user sees of a run: output, progress, tables, the page of a report.

Read ``console``, ``progress`` (a run by its events), ``live``, ``page`` and ``plan_table``. ``bar`` and
``screen`` draw the line below the output; ``bottleneck`` says what bounds a step; ``differences``
compares runs.
"""
