"""Telemetry of the cache, for Prometheus, /server_info and each response."""
