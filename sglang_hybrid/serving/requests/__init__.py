"""Values of a request that the cache reads: those that clients set, and those of the server."""
