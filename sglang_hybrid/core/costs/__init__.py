"""FLOPs and bytes: of a layer, of a prefix, of a state."""
