"""Render the report of a run: one HTML page with its charts as inline SVG, and the same charts as PNG files."""
