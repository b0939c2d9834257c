"""The loss of a micro-batch: traced once, rewritten by passes, evaluated by the table."""
