"""Returns of requests, their times, and the likelihood of the next one."""
