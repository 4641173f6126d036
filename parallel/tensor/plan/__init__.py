"""The tensor plan: which layers are sharded how. The plan as data, the styles that describe it, and their rules."""
