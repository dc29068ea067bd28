"""Which waiting request runs next, and when its loads begin."""
