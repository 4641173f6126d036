"""State of a rank between two steps: its inventory, and its offload to the host and back."""
