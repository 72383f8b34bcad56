"""Polar: rollouts as a service for agentic reinforcement learning."""

__version__ = "0.1.0"
