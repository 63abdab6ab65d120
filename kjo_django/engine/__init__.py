"""Running jobs: polling, scheduling, and a group's way from its claim to its release."""
