"""Times steps and says where they wait: bench, profile, their tables and pictures.

It drives an engine as a user does, and changes none.
"""
