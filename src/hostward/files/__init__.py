"""Small files that are read and written whole: JSON with a schema, atomic replacement, folder locks."""
