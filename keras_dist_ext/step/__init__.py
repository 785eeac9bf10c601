"""Compute one step on a replica, and what all replicas agree on.

In reading order:

    replica_step      what a replica computes in a step, made of:
    row_weights         what its numbers weigh in those of the global batch
    draws               the random numbers of a step
    layer_state         state that layers assign
    metric_state        what metrics compute from the rows of all replicas
    gradients           from a replica's gradients to those of the global batch
    jacobians           those of a replica without examples
    gradient_values     dense or sparse, the values of one
    kept_gradients      those that are not summed yet, and where they go
    compression         rounds gradients to 16 bits before they are sent, and sends later what is left
    branches            branches, loops and functions in which replicas add up
    reducers          how replicas add up: a single one, mirrored, on a TPU
    update            let every replica run an optimizer
    fused_updates     what an optimizer does to a variable, by one op
    slices            sums of sparse gradients, the same bits on every replica
    step_options      what holds for a step, whatever its batch
    step_plan         what is known of a step before it is traced to be run
    plain_calls       steps that only hand on what Keras computes, and need no plan
    global_gradients  ``kde.reduce_gradients``
    observer          hooks that are called while a step is traced
    ancestry          what a value in a graph is computed from
    origins           which values are one replica's own
    distributed_model what a step needs of a model, as a type
    means             which numbers are means over examples
    batch_scaling     whether a loss is a mean or a sum over examples
    measured_exponents  how numbers grow with the examples, where no graph tells
    lone_replica      a step on one replica without the others
    alike_draws       the same random numbers for each example
    added_losses      what layers give to ``add_loss``
    reduce            sums over replicas
    gather_rows       ``kde.gather_rows``, ``kde.row_indices``: the rows of all replicas
    all_rows          what a step does for these
    logs              the metrics of a step
    pass_through      hooks that do what Keras does
    hook_checks       whether Keras still calls the hooks
    hook_uses         what has to call them
    state_checks      whether private state is where it was
    save_hook_checks  whether saves still call the hooks
    virtual_replicas  several replicas, one after the other, on one device
    suspendable_thread  how each waits for the others
    xla, graphs       what is compiled by XLA, and what runs as a graph
    seeds             ``kde.seed_replicas``: a stream of random numbers for each replica
    generator         a source of random numbers of a model, and its streams
    global_generator  what is behind ``seed=None``
    draw_refusals     models and host code that cannot draw as one device does
    drawn_shapes      which numbers have a dimension of examples
    global_draws      a replica's rows of what one device would draw
    seed_table        ``kde.describe_seeds``
    nan_guard         leave out steps with NaN or infinity
    recorder          record each step on the device
    step_clocks       when what of a step was done
    step_buffer       where that is kept
    sampled_table     what of it stays on a GPU, and clocks that are read in some steps only
    untimed_steps     times of the others
    stats             what was recorded, as arrays
"""

__all__: list[str] = []
