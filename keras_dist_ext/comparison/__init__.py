"""Helpers of `certificate`: one device and the strategy, step by step from equal weights, and what sets them apart.

In reading order: `global_batches`, `sides`, `lockstep`, `gaps`, `draws`, `suspects`, `certified_script`.
"""
