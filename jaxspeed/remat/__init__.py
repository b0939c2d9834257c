"""Activation rematerialization: policies, budgets, and what they cost."""
