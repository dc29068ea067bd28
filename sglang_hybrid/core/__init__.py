"""Decisions of a cache: costs, candidates, victims, reuse, admission. Imports neither torch nor
sglang.
"""
