"""Plans for devices that are not here: estimate, compile, search, page."""
