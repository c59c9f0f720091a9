"""One page about a run: HTML with its charts as inline SVG, and the same charts as PNGs."""
