"""`python -m polar`: the same as the `polar` command."""

from polar.cli import main

main()
