"""Bridges against the trainers' own packages; `make test-trainers` installs them."""
