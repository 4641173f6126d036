"""Command ``trine doctor``: checks that training would start on these hosts, and measures the links between ranks."""
