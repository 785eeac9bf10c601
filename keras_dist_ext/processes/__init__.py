"""Helpers of `launch`: one process, what runs in it, and a set of them that lives and dies together.

In reading order: `pulse`, `worker`, `process`, `whereabouts`, `failure`, `generation`; `program`, `tasks`, `cores`,
`signals`.
"""
