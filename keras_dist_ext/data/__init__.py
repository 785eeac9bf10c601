"""Split data over workers and replicas, batch sequences by length, and look into pipelines.

In reading order:

    split                cut a global batch into the examples of each replica
    graph_checks         check data while a graph runs
    distribute           ``kde.distribute``
    sharding_findings    what of a pipeline goes wrong when workers and replicas share it
    buckets              ``kde.bucket_by_length``
    bucket_plan          which sequences are batched together
    pools                sequences are read in pools, measured and padded
    sources              whatever ``fit`` takes, as a ``tf.data.Dataset`` of batches
    audit                ``kde.audit``: which examples each worker and replica gets
    audit_findings       what is wrong with it
    pipeline             ``kde.inspect``: what a pipeline's stages cost
    dataset_graph        what a pipeline is made of
    stage_times          what each of its stages takes
    pipeline_findings    what to change
    map_findings         where maps and filters are slow
    order_findings       where the order of stages is
    regrouping_findings  where elements are taken apart and put together again
    padding              how much of the batches is padding
    iterators            release an iterator without waiting for its threads
"""

__all__: list[str] = []
