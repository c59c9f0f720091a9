"""Read and write small files as a whole: JSON with a schema, atomic replacement, folder locks."""
