"""Helpers of `strategy`: what there is, what it calls for, and how it is made.

In reading order: `cluster`, `mpi`, `facts`, `decision`, `wording`, `rendezvous`, `builders`.
"""
