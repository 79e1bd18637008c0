"""Frozen configs, one file per thing configured, read from raw JSON.

Nothing that matters is guessed: a missing key is an error that names it. No tensors, no files.
"""
