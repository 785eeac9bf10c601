"""Go on after a crash from the last checkpoint of a run: ``kde.Resume``.

In reading order:

    callback           ``kde.Resume``
    run_state          what a model's training depends on
    callback_state     what callbacks keep
    position           where in its data a run is
    checkpoints        the newest few checkpoints of a run
    background_writer  write while training goes on
    preemption         notice that the process is asked to end
"""

__all__: list[str] = []
