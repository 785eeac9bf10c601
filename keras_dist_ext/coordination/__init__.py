"""Helpers of `coordinator`: what the workers of a parameter-server cluster run and read.

In reading order: `pool`, `worker_data`, `worker_steps`, `worker_calls`.
"""
