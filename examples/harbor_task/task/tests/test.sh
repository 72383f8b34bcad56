#!/bin/bash
# Runs the same under Harbor and under Polar: the tests are in /tests, the reward goes into /logs/verifier.
if python3 -I /tests/check.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
