"""Helpers of `strategy`: what there is, what it calls for, and how it is made.

In reading order: `cluster`, `facts`, `decision`, `wording`, `builders`.
"""
