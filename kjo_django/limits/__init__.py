"""Limits that hold over all workers together: how often jobs start, and how many run at once.

``rules`` says which limits a job has, ``limiter`` which deliveries of a group start now. ``lines``
is the line of jobs that wait. ``control`` is what operators change.
"""
