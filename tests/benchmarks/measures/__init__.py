"""What kjo_django does, measured; each function runs in a process of its own."""
