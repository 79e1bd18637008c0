"""The command line, one file a command: options, messages, exit codes.

What a command does lies in the room that does it; torch is imported inside commands, so that help
is quick.
"""
