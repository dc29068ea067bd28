"""Replays request traces through the same core objects as the server, without a model."""
