"""Files become configs and weights: the hub, safetensors, the tokenizer.

The only room that knows file names and keys; it never runs a model, nor code that came with one.
"""
