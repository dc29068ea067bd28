"""Requests that have ended, as they are remembered and replayed."""
