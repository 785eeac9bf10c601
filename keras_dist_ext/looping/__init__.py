"""Helpers of `loop`: a step of one's own, examined before it runs, and what it returns added up.

In reading order: `arguments`, `examined_step`, `losses`, `ancestry`, `origins`, `step_variables`, `python_effects`,
`tallies`, `loop_program`.
"""
