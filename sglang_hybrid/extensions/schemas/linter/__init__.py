"""Finds what keeps prompts from being cached."""
