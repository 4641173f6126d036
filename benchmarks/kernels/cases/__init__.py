"""What each operator is measured and checked on."""
