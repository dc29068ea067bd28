"""Positions of a prefill that get a checkpoint."""
