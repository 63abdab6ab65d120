"""Enqueue: in the caller's transaction, once per unique id, refused before anything is written.

Most modules run each test on a transactional transport (the database's) and on one that needs the
relay (the memory transport).
"""
