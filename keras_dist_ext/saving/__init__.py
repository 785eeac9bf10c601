"""Helpers of `resume`: all that a run depends on, written whole or not at all.

In reading order: `run_state`, `callback_state`, `position`, `write_behind`, `saves`.
"""
