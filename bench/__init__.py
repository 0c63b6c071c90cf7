"""Measurements of Lily and what they need: synthetic checkpoints, timing loops, records.

Each module is a program, run from the root of the repository as `python -m bench.NAME`.
"""
