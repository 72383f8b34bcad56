"""ledger: part of an example."""
