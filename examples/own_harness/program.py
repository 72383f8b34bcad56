"""The agent: asks the model a few times, each time with all that was said. Needs nothing but Python.

It finds the model as any program does, by OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL.
"""

import json
import os
import sys
import urllib.request

turns, question = int(sys.argv[1]), sys.argv[2]
messages = [{"role": "user", "content": question}]
for turn in range(turns):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 24}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)["choices"][0]["message"]
    print(answer["content"], flush=True)
    messages += [answer, {"role": "user", "content": f"And then? ({turn + 1})"}]
