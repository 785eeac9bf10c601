"""Say why a run is not faster, and what to change: ``kde.diagnose`` and ``kde.ParallelismDoctor``.

In reading order:

    bounded_run        ``kde.diagnose``: train for some steps, and put the model back
    doctor             ``kde.ParallelismDoctor``, a callback
    doctor_command     ``keras-dist-ext doctor SCRIPT.py``
    run_trace          what happens in one run
    setting            its strategy, devices and graphs
    host_clock         the time of callbacks and of tracing
    python_clock       the time of Python that steps call
    python_data        how Python makes batches
    step_blocks        the time of steps
    epoch_clock        the time between epochs
    interventions      experiments
    dtype_speed        how fast the device is in the model's dtype
    layout_speed       how fast it is for channels first
    map_loops          loops over the examples of a batch
    shape_trials       what padding, and new shapes of batches cost
    shapes             their figures
    part_trials        what metrics, and layers that loop, take of a step
    parts              their figures
    trials             what they have shown
    examination        all that is known when a run is judged
    rules              judge it
    setting_rules      by its setting
    waiting_rules      by how long replicas wait for data, tracing and the start of executions
    python_data_rules  by how Python makes batches
    callback_rules     by how long they wait for callbacks
    replica_rules      by what they compute, and how long they wait for each other
    epoch_rules        by what is done between epochs
    dtype_rules        by the dtype that is computed with
    map_loop_rules     by such loops
    shape_rules        by the shapes of batches
    part_rules         by metrics, and layers that loop
    update_rules       by how long updates of weights take
    python_rules       by the Python that steps call
    why_not            why nothing can be done about the rest
    units              durations and sizes for people
    report             show what was found
    comparison         what a change has brought, from two reports
"""

__all__: list[str] = []
