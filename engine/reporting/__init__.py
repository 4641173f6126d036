"""What a run tells: the report of a step, where reports go, and the banner."""
