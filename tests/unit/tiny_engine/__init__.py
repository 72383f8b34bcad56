"""Unit tests of the tiny engine; a package, so that its file names may recur elsewhere."""
