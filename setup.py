"""Packages by discovery: folders at the top of the repository are subpackages of `paceline` once installed."""

from setuptools import find_packages, setup

TOP = ("bench", "client", "device_agent", "server")

setup(
    packages=find_packages(include=["paceline", "paceline.*"])
    + [f"paceline.{name}" for top in TOP for name in find_packages(include=[top, f"{top}.*"])],
)
