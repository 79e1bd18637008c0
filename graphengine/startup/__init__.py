"""From options to an engine that is ready: plan memory, load, compile, capture, warm up.

Nothing here runs in a step.
"""
