"""Tiers of memory: how fast they are, where copies are, and what a copy is worth."""
