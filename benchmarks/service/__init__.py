"""Load on the training service: many clients at a time beside a bare echo of the same server."""
