#!/bin/bash
cat > /app/count.py <<'PY'
import collections, re, sys

words = collections.Counter(re.findall(r"[a-z]+", open(sys.argv[1]).read().lower()))
for word, number in sorted(words.items(), key=lambda item: (-item[1], item[0]))[:3]:
    print(word, number)
PY
