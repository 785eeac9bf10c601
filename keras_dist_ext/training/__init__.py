"""Models, the loops over their steps, and what happens around a loop.

In reading order:

    model             ``kde.Model`` and ``kde.Sequential``
    documented        methods that show Keras' docstrings
    compile_config    what ``compile`` was given, as it is saved
    compile_notes     where files say what was given beyond Keras' arguments
    batch_statistics  of whose examples BatchNormalization takes them
    exactness         what ``compile(exact=True)`` cannot be combined with
    whole_batch_layers  layers of Keras that compute something of all examples of a batch
    construction      models are made in the scope of their strategy
    runtime           what a model holds for its runs, apart from its layers
    building          build a model for its steps
    program           runs the steps of training and evaluation, one or several at once
    step_loops        loops over a step, traced or run as Python
    distributed_step  one step over all replicas, and its logs
    step_logs         its logs
    step_exponents    which of its numbers are means over the rows, and which sums
    plain_steps       which steps of the user's may be such
    step_planning     trace a step of the user's in a scratch graph, to make its plan
    step_examination  what is seen of a step that is traced in a scratch graph
    step_assignments  what a step may assign
    step_errors       why a step cannot be traced, where TensorFlow does not say
    batch_clock       a batch waits for the clock that says when it was there
    batch_devices     where batches are on a machine with GPUs
    batch_split       a replica's rows of a batch
    draw_examination  and of the random numbers in one
    few_rows          a few rows of a batch
    prediction        the compiled loop of ``predict``
    runs              a run of ``fit``, ``evaluate`` or ``predict``: its checks, callbacks and data
    runners           what Keras calls for each execution
    epoch_data        the executions of an epoch: Keras' epoch iterator
    execution_planner how many steps the next one makes, agreed on by all workers
    run_dataset       the data of a run, and how its workers read it
    passes            the passes over it, and how many batches they have read
    evaluation_passes how many of them evaluation has begun
    execution         some steps to be made at once
    batch_reader      the batches of a pass
    next_pass         the iterator that Keras makes when one ends
    batch_spec        their shapes, with any number of rows
    data_order        a pass in the order of a seed
    execution_sizer   how many steps an execution makes
    xla_rule          whether XLA compiles what replicas compute in them
    run_callback      ``kde.RunCallback``
    callbacks         ``kde.ScopeGuard`` and ``kde.ReplicaSeeds``
    actions           ``kde.every``, ``kde.on_improvement``, ``kde.on_preemption``
    nonfinite         ``kde.NonFinite``
    stop_signal       a wish to end a run, followed by all workers after the same step
    worker_sync       several workers begin alike and end together
    whole_saves       saved files are whole, also if several workers write them at once
    worker_saves      what a worker saves is whole, and asks nobody at the terminal
    divergence        find variables whose copies differ
    self_check        a step on a few examples, on one device and on replicas, before training
    step_comparison   make such a step both ways, and compare
    comparable_steps  what differs by definition is left out of such steps
    failed_steps      a step that needs more examples than a replica has
    prediction_comparison  predict so, and compare
    check_mode        whether that is done
    deviation_report  what is said of it
    deviations        how far replicas are from one device, and what rounding explains
    snapshot          keep the state of a model, and restore it
    loop              ``kde.TrainLoop``
    adoption          ``kde.adopt``, ``kde.clone_model``, ``kde.load_model``
    local_copy        ``kde.local_copy``
    resume            ``kde.Resume``
    placement         ``kde.place``
    parameter_server  training under a ``ParameterServerStrategy``
"""

__all__: list[str] = []
