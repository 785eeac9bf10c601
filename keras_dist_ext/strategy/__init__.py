"""Choose a strategy, check that things live under it, and keep its workers in agreement.

In reading order:

    pick         ``kde.pick_strategy`` and ``kde.StrategyChoice``
    resources    what there is: devices, a cluster, a TPU
    decision     which strategy to build, and why
    builders     build it
    packs        how much goes into one sum
    given        check what is given as a strategy
    scope        ``kde.check_scope``: whether variables live under the strategy
    adapted      what layers have learnt by ``adapt`` outside of it
    virtual      ``kde.VirtualReplicas``: for how many replicas a run is defined
    workers      the workers of a ``MultiWorkerMirroredStrategy``: sums and broadcasts between steps
    consistency  see that all workers are about to do the same
    key_value    what workers tell each other without a collective
    presence     where each worker is, and whether its program has ended
    prompt_exit  end a process soon after its program has failed
    deadlock     find workers that wait for each other
"""

__all__: list[str] = []
