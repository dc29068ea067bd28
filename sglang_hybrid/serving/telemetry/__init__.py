"""What the cache did, for Prometheus, /server_info and each response."""
