"""The conformance table: what is trained (`models`), on which data (`feeds`), row by row (`rows`), and how (`run`)."""
