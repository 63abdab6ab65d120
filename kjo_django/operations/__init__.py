"""Operations on jobs, queues, workers and dead letters: one service layer for all surfaces.

Commands, the admin and the REST API parse input and show results; the operations are here. An
operation reads rows in bounded chunks, and each chunk is one transaction, so a selection may be of
any size. Signals are sent after the chunk is committed.
"""
