"""Helpers of `placement`: which layers and devices are meant, where a step's ops run, and whether that helps.

In reading order: `groups`, `parts`, `variables`, `trace`, `timeline`, `verdict`.
"""
