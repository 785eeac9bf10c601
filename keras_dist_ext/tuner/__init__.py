"""Search hyperparameters with keras-tuner, the strategy among them: each trial runs under its own.

    tuner = kde.tuner.RandomSearch(build_model, objective="val_loss", strategies=["one_device", "mirrored"])
    tuner.search(x, y, validation_data=validation, epochs=5)
    tuner.strategy_report()

Importing this package imports neither TensorFlow nor keras-tuner: each name below loads its module when it is first
used. Without keras-tuner, that raises an error that says how to install it: the extra `keras_dist_ext[tuner]`.

In reading order:

    tuners           RandomSearch, BayesianOptimization, Hyperband, GridSearch, with_strategies
    search           StrategySearch: what all of them do
    strategies       the strategies of a search, as a hyperparameter
    coupled          Coupled: batch size and learning rate follow the number of replicas
    objectives       examples_per_second, seconds_to, cost
    space            the order of hyperparameters, and whether a project has the same strategies
    model_builder    build the model of some hyperparameters
    scoped           in the scope of its strategy
    trial_run        follow a trial
    meter            measure how fast it trains
    failures         classify why it failed
    records          what is recorded in its folder
    trial_logs       its logs for TensorBoard
    global_state     restore Keras' and TensorFlow's settings after it
    infeasible       keep the oracle away from what cannot run
    screening        Screening: drop slow strategies before the search
    search_screening once in a project, by one process
    model_benchmark  measure one of them
    benchmark_log    log which one runs
    strategy_report  StrategyReport
    processes        launch_search, SearchRun: a search in several processes
"""

from keras_dist_ext.versions import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
