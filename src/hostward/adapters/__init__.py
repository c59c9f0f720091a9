"""Glue to the libraries that people train with, one file for each."""
