"""A server around the cache: its flags, checks, start and end, and whose a request is."""
