"""Train by a step of one's own: ``kde.TrainLoop``.

In reading order:

    train_loop        ``kde.TrainLoop``
    arguments         its arguments, checked
    replica           ``kde.Replica``, what a step is given
    gathering         ``kde.per_replica`` and ``kde.gather``
    loop_program      the compiled loop
    declared_values   what steps return, as it was declared
    step_metrics      add it up
    plain_variables   the ``tf.Variable``s among the parts
    examined_step     trace a step once, and refuse what would go wrong
    losses            whether a loss is a mean over examples
    step_variables    which variables a step uses and changes
    python_effects    what a function does in Python
"""

__all__: list[str] = []
