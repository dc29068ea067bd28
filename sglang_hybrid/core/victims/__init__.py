"""Which entry of a pool is evicted first."""
