"""From a plan to live parts on this rank."""
