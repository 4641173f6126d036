"""What is cut how: the tensor plan as data, in words, and the rules that make it."""
