"""What tests of presets share."""

from __future__ import annotations

MCP = [
    {"name": "files", "transport": "stdio", "command": "serve", "args": ["--here"]},
    {"name": "old", "transport": "sse", "url": "http://x/sse"},
    {"name": "web", "transport": "streamable-http", "url": "http://x/mcp"},
]
"""A server of each transport."""
