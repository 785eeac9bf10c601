"""Helpers of `adoption`: a model taken apart and made again under a strategy.

In reading order: `recipe`, `rebuild`, `twins`, `stand_in`, `compilation`.
"""
