"""What a project, or the author of a backend, needs to test against kjo_django."""
