"""Stands for the package of that name, so that the sample needs no network."""


def post(url, json, timeout):
    raise OSError(f"{url} is not there")
