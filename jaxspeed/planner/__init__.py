"""Plans for absent devices: estimate of memory and time, compile, search, page."""
