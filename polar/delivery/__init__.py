"""Getting results to trainers: what is owed is a row until it is acknowledged."""
