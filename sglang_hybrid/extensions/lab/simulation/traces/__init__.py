"""Request traces: formats, generators, and what clients could have said."""
