"""textkit: part of an example."""
