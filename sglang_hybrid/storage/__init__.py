"""Copies of KV and states below the device: in host memory and on disk."""
