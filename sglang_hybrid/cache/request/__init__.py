"""The steps of a request in the cache: look-up, growth, publication, pins."""
