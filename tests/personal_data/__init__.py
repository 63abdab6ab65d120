"""What is kept of a person, found and erased."""
