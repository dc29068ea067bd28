"""The order of waiting requests, and the start of their loads."""
