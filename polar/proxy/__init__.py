"""The recording proxy of a node: harnesses speak their provider's dialect to it, and it keeps every token.

app        routes, bodies, errors                        relay     streams and hang-ups
sessions   whose key this is                             calls     one model call, from request to recorded answer
ledger     which recorded call this one continues        ledgers   ledgers filled from completions
pool       engines and renderers of lanes                sampling  the engine call: retries, aborts
recorder   group commit
"""
