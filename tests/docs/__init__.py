"""Tests of the documentation: every command of a page runs, or says why not."""
