"""What web code touches: ``@job``, its options, and storing the rows of jobs."""
