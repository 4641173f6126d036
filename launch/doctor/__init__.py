"""``trine doctor``: whether training would start on these hosts, and how fast the links between its ranks are."""
