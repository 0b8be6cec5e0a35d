"""What is said of input that cannot be exported."""

import sys


class Unmappable(Exception):
    """A node that has no counterpart; its text says why."""


def refuse(problem):
    print(problem, file=sys.stderr)
    sys.exit(2)
