"""Entries kept coded on the device instead of being evicted (`--hybrid-device-codec`)."""
