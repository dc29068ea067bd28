"""State slots: which are free, what takes them, and who waits for one."""
