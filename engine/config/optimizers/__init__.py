"""Settings of the built-in optimizers, and the rules between them and other sections."""
