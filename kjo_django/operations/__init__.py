"""What people and programs do to jobs, queues and dead letters: the one service layer.

Commands, the admin and the REST API parse and show; the operations themselves are here, once. An
operation takes rows in bounded chunks, and each chunk is one transaction. So a selection may be of
any size. Signals are sent once their chunk is committed.
"""
