"""The conformance table: what is trained (`models`), on which data (`feeds`), row by row (`rows`), and how (`run`).

`python -m conformance` sees each row fail (`seen`) with its cause put back (`causes`).
"""
