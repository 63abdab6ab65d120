"""The entry of a measuring process: runs one function and prints its answer as JSON.

Started by `child.py` as ``python -m tests.benchmarks.measure PACKAGE.MODULE.FUNCTION ARGUMENTS``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys


def main() -> int:
    """Set Django up, then run the step."""
    module, _, function = sys.argv[1].rpartition(".")
    arguments = json.loads(sys.argv[2])
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    import django

    django.setup()
    step = getattr(importlib.import_module(f"tests.benchmarks.{module}"), function)
    print(json.dumps(step(**arguments)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
