"""A process that does what it is given: python -m tests.acceptance.run_code CODE."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
