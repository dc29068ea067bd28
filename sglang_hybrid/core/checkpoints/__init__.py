"""Which positions of a prefill get a checkpoint."""
