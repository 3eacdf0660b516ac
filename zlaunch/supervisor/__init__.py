"""The launcher while a run goes on: connect, follow, judge, stop, try again. No torch.

Read ``job`` (attempts of a run), ``nodes`` (agents of an attempt and their silence), ``controller`` (its
events), ``step_signal``, ``verdict`` (which failure to report), ``hang`` and ``end``. ``run_folder`` and
``run_files`` keep the record; ``found_runs`` reads it; ``provenance``, ``code_state``, ``git_state`` and
``code_changes`` keep what a run was made of; ``bundle`` and ``redact`` make an archive without secrets.
"""
