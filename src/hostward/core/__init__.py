"""What everything speaks of: sizes, the parameter inventory, placements, limits of this host. No torch."""
