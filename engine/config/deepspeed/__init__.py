"""DeepSpeed's configuration: older forms are rewritten, and its own keys honored, noted or refused."""
