"""The public names: explicit, lazy, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kjo_django


def test_all_is_what_the_package_promises_to_load():
    assert kjo_django.__all__ == sorted(kjo_django._PUBLIC)
    for name in kjo_django.__all__:
        assert getattr(kjo_django, name) is not None
        assert name in dir(kjo_django)


def test_each_name_is_the_one_of_its_module():
    from kjo_django.enqueue.definition import job
    from kjo_django.exceptions import PermanentError

    assert kjo_django.job is job
    assert kjo_django.PermanentError is PermanentError


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'jobb'"):
        kjo_django.jobb
    with pytest.raises(ImportError):
        exec("from kjo_django import jobb")


def test_importing_the_package_needs_neither_settings_nor_apps():
    code = (
        "import sys, kjo_django; dir(kjo_django); kjo_django.__version__; "
        "assert 'kjo_django.models' not in sys.modules; "
        "from kjo_django import PermanentError, Retry; "
        "assert 'kjo_django.models' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PATH": ""}, timeout=60)


def test_the_package_is_typed():
    from importlib.resources import files

    assert files("kjo_django").joinpath("py.typed").is_file()
