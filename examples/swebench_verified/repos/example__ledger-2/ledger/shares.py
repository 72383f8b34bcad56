"""Sharing amounts of cents."""


def split(total: int, people: int) -> list[int]:
    """Shares that differ by one cent at most, larger ones first."""
    return [total // people] * people
