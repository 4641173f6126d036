"""Silent corruption: bits that change without a write, copies that differ, machines that compute otherwise."""
