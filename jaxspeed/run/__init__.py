"""One run from a config: the loop over steps."""
