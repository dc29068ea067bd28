"""Bytes of the copies of KV and states below the device: files on disk, and smaller copies."""
