"""Helpers of `monitor`: from records of steps to intervals, and from intervals to files and screens.

In reading order: `intervals`, `watch`, `exchange`, `stragglers`, `divergence`, `manifest`, `append_file`, `json_lines`,
`event_files`, `terminal`.
"""
