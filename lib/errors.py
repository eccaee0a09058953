"""The base of every error that the package raises on purpose, so that the command line can tell them from bugs."""

LONGEST = 200  # characters of a value in a message


class LeakbookError(Exception):
    """Something the user can put right; the message says what was wrong and what would be right."""


def cut(text: str) -> str:
    """A text as it is, or its beginning with the number of characters, where a message has no room for it."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 40]}... ({len(text):,} characters)"


def shown(value: object) -> str:
    """A value as Python writes it, cut to what a message has room for."""
    return cut(repr(value))
