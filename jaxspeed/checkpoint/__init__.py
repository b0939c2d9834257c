"""States on disk."""
