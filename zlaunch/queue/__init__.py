"""Runs that wait until there are slots for them: one queue for a user and machine, in SQLite.

Read ``store`` (jobs and their states), ``schedule`` (who starts where, pure) and ``daemon`` (starts and
follows attempts). ``start_request`` and ``process_settings`` carry a submitter's environment.
"""
