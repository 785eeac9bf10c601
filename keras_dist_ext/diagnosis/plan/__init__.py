"""Predict what more replicas would give: ``kde.plan``.

In reading order:

    plan            ``kde.plan``: measure a model, and predict
    planned_script  ``keras-dist-ext plan SCRIPT.py``
    measure         measure what a step of one replica costs
    sums            time sums over replicas by themselves
    sums_in_steps   time what sums add to the steps of a model
    measurements    what was measured, as plain values
    links           networks: as they are written, as documented, as measured
    step_costs      from measurements to the seconds of a step on so many replicas
    scaling         the curve over numbers of replicas, and where it stops paying
    what_ifs        what a change would bring
    assumptions     what was not measured, in sentences
    plan_report     show it
"""

__all__: list[str] = []
