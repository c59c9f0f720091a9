"""The command line. Nothing heavy is imported before a command needs it, so that `hostward --help` is quick."""

from __future__ import annotations

from .main import main

__all__ = ["main"]
