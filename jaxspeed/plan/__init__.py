"""M against N before anything is rented: what a step needs of a device that is not here."""
