"""calendars: part of an example."""
