"""The daemon: supervisor, gateway, workers, and the protocols and the ring that they stand on."""
