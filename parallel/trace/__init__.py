"""One forward of the user's model followed on shapes: calls, operations between them, where values come from."""
