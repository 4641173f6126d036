"""What is found out about, and put on, a user's module: blocks, forward patches, placeholders, random streams."""
