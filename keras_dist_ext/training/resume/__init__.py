"""Resume a run after a crash from its last checkpoint: ``kde.Resume``.

In reading order:

    callback           ``kde.Resume``
    save_schedule      when checkpoints are due
    save_wishes        what is wished for between executions
    run_state          the state that a model's training depends on
    callback_state     the state of callbacks
    frozen_values      copies of their attributes, as JSON and arrays
    position           the position of a run in its data
    tests_before       make up for the passes of evaluation
    checkpoints        the newest checkpoints of a run
    shared_checkpoints the chief's newest one, for all workers
    owner              which run owns their directory
    contents           check what a complete checkpoint says
    same_run           and that it is of this run
    background_writer  write while training continues
    preemption         notice that the process is asked to exit
"""

__all__: list[str] = []
