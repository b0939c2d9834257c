"""Plans for absent devices: estimate of memory and time, compile, search, page."""

SEARCH_SECONDS = 240.0  # for the estimates of a search
