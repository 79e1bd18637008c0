"""Judges an engine's tokens by what the target alone would say (lossless.md).

It decides with the plain model, never with what it tests.
"""
