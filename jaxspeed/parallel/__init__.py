"""How compute crosses devices: tensor parallelism (`tensor/`)."""
