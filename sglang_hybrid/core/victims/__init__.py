"""Policies: the entry of a pool that is evicted first."""
