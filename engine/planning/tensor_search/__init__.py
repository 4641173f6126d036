"""What a search for a tensor plan has found, and where it is kept between starts."""
