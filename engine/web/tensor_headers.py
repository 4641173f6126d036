"""Headers and media type of requests with tensors, which client and server share."""

SESSION, NUMBER, VERSION = "x-trine-session", "x-trine-number", "x-trine-version"
TENSORS = "application/octet-stream"
