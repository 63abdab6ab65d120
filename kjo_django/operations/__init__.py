"""What people and programs do to jobs, queues and dead letters: the one service layer.

Commands, the admin and the REST API parse and show; what they do is here, once. An operation takes
rows in bounded chunks, each chunk one transaction, so a selection may be of any size; signals are
sent once the chunk is committed.
"""
