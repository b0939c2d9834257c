"""A run's processes on Ray: `driver.py` is a Ray job that starts one actor for each of them."""
