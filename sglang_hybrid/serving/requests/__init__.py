"""What a request says to the cache, and what only the server may say of it."""
