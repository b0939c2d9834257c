"""Search for the fastest config on a target, and advice for a config that does not fit.

The folder depends on neither config files nor the estimator: both are passed in, so that the search
can be compared with an exhaustive one.
"""
