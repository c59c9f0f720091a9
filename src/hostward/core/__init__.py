"""Define sizes, the parameter inventory, placements and the limits of this host, which every room uses. No torch."""
