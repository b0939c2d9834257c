"""Rewards of sampled completions, and what training reads of them."""
