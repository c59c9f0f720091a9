"""Adapters for trainers of others; each module needs its own library, and nothing else imports it."""
