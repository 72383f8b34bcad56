"""The recording proxy of a node: harnesses speak their provider's dialect to it, and it keeps every token.

app        routes, keys, bodies                  sampling   the engine call: retries, aborts
relay      answers, streams, hang-ups            answering  from a sample to an answer
flights    calls under way, and who waits        rows       a call as columns
calls      the order of a call's steps           recorder   group commit
sessions   whose key this is                     reads      queries
ledger     which call this one continues         wire       errors as statuses
ledgers    ledgers filled from completions       limits     clocks and sizes
metrics    what is counted                       showing    an ended call as figures and span
prepare    budget, prompt, sampling              pool       engines and renderers of lanes
"""
