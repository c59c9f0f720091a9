"""`python -m hostward`."""

from .cli.main import entry

entry()
