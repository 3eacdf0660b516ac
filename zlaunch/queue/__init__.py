"""Runs that wait until there are slots for them: one queue for a user and machine, in SQLite.

Read ``submit``, ``store`` (jobs and their states), ``schedule`` (who starts where, pure), ``daemon`` (starts
and follows attempts), ``attempt_process`` (runs one) and ``cancel``. ``start_request`` and
``process_settings`` carry a submitter's environment.
"""
