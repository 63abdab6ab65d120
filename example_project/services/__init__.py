"""Two services that tell each other what happened; see example_project/services/README.md."""
