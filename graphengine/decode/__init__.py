"""The decode loop and what one step is made of: rows, chains, buckets, attention, K/V pages,
prefill, acceptance, sampling.

It never reads a checkpoint. A step waits for the device once, with grammars twice.
"""
