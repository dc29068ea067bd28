"""The account of one memory that KV and states share."""
