"""M against N: what a step needs and takes, told before anything is rented."""
