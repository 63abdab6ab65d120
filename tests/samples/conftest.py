"""The tests of sample projects run in projects of their own."""

collect_ignore_glob = ["*_project/*"]
