"""Training steps over gloo, measured by axis, ZeRO stage and schedule."""
