"""Exits with 0 if /app/count.py counts right: it is run as a program, so nothing in it can speak for the tests."""

import subprocess
import sys
import tempfile

CASES = {
    "b a c b a b": "b 3\na 2\nc 1\n",
    "One, one; two. TWO three": "one 2\ntwo 2\nthree 1\n",
    "zeta eta theta iota": "eta 1\niota 1\ntheta 1\n",
    "alone": "alone 1\n",
}

for text, expected in CASES.items():
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(text)
        file.flush()
        done = subprocess.run([sys.executable, "/app/count.py", file.name], capture_output=True, text=True, timeout=20)
    if (done.returncode, done.stdout) != (0, expected):
        sys.exit(f"for {text!r} it printed {done.stdout!r} and exited with {done.returncode}: {done.stderr[-500:]}")
print(f"{len(CASES)} cases are right")
