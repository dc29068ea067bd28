"""What each step of a request does to the cache: look-up, growth, publication, pins."""
