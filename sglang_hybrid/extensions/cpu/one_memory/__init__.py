"""KV and states in one memory on the CPU, by pools and allocators of our own."""
