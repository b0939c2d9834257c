"""The train state: its leaves, the placement of the optimizer's, and how it is initialized."""
