"""The decode loop and what one step is made of: rows, chains, buckets, attention, K/V pages,
prefill, acceptance, sampling.

It never reads a checkpoint, and waits on the device in one place.
"""
