"""Rules that options keep together, and what is said where they do not."""
