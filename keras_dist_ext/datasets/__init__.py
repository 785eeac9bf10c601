"""Helpers of `sharding`, `buckets`, `audit` and `pipeline`: what a dataset is made of, and what is found in it.

In reading order: `sources`, `dataset_graph`, `sharding_findings`, `bucket_plan`, `pools`, `audit_findings`,
`stage_times`, `pipeline_findings`.
"""
