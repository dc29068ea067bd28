"""What several servers hold: their prefixes in one index, so that a router can compare them."""
