"""What a training step costs over gloo: by axis, by ZeRO stage, by schedule."""
