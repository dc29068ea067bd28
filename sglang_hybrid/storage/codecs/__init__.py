"""Smaller copies of KV and states."""
