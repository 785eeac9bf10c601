"""Certify that a strategy trains a model as one device would: ``kde.certify``.

In reading order:

    certification       ``kde.certify``: make the steps, and find out why they differ
    certificate         ``kde.Certificate``: what came of it
    certifiable         what can be compared with one device
    certified_script    ``keras-dist-ext doctor --certify SCRIPT.py``
    global_batches      the batches that are compared
    lockstep            the same steps on one device and on replicas
    training_run        make one step, and read all that it changes
    drawn_numbers       what random ops draw while steps are compared
    draws               and what they draw on each replica
    seeded_steps        the same steps with the random numbers that they draw
    root_causes         find by experiment what makes a difference
    deviation_findings  differences of state, optimizers, metrics and logs
    crashes             why a step does not run
"""

__all__: list[str] = []
