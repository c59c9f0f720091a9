"""Declare the rules that options keep together, and the messages where they do not."""
