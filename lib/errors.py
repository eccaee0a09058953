"""The base of every error that the package raises on purpose, so that the command line can tell them from bugs."""


class LeakbookError(Exception):
    """Something the user can put right; the message says what was wrong and what would be right."""
