"""Watches the traffic, replays it under other policies in worker processes, and says which is best.

The server's first tensor-parallel rank records finished requests; the choice travels to every rank
with the requests of a scheduler step.
"""
