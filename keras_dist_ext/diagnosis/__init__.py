"""Helpers of `diagnose` and `doctor`: what is measured, what is tried, and the rules that judge.

In reading order: `setting`, `host_clock`, `step_blocks`, `examination`, `visit`, `setting_rules`, `time_rules`,
`kept_state`, `bounded_run`, `interventions`, `report`, `doctor_command`.
"""
