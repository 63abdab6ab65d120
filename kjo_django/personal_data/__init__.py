"""What is kept of a person: found by key, id or the value of a field, and deleted or redacted."""
