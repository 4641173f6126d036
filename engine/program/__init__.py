"""Program of one microbatch: the batch, the model call and the loss."""
