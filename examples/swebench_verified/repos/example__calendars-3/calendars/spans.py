"""Spans of time, from a start up to an end."""


def overlap(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether two spans have a moment in common; a span does not hold its end."""
    return first[0] <= second[1] and second[0] <= first[1]
