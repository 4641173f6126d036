"""Rules between the settings of optimizers and those of other sections."""
