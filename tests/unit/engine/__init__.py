"""The pipeline: a group of deliveries in, durable outcomes out.

On a SQLite file; where the database has a say in it, on PostgreSQL too (``both``).
"""
