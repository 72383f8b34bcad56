"""Command line of the tiny engine: `python -m polar.tiny_engine [--model DIR | --script FILE] --port N`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path


def main() -> None:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(prog="python -m polar.tiny_engine", description="Serve a tiny or scripted engine.")
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: the packaged one")
    parser.add_argument("--script", type=Path, help="serve answers from this JSON file instead of a model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--name", help="served model id")
    parser.add_argument("--latency-seconds", type=float, default=0.0, help="scripted only: wait before each answer")
    args = parser.parse_args()
    # Two BLAS threads cost several times the time of one at this size; numpy reads this when first imported, so the
    # import of the server has to come after it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from polar.tiny_engine.server import serve

    try:
        serve(args.model, args.script, args.host, args.port, args.name, args.latency_seconds)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
