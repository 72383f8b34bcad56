"""`python -m workers.engine --port 8000` — the tiny engine, served: what a lane talks to where no GPU is."""

from polar.tiny_engine.__main__ import main

if __name__ == "__main__":
    main()
