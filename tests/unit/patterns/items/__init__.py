"""Template consumers through a worker in this process: six methods, three hooks, one flow.

What only real servers and killed processes can show is in tests/acceptance/test_kjo_consumer.py.
"""
