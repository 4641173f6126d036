"""What of an engine is in a checkpoint: tensors that this rank holds or stores, optimizer and trainer state."""
