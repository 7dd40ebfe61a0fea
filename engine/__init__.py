"""The engine side: requests, the channel to the workers, the host process and the engine adapters."""
