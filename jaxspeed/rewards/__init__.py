"""Rewards of completions: functions in workers, reward models; advantages."""
