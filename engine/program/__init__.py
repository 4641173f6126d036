"""What one microbatch is and computes: the batch, the model call and the loss."""
