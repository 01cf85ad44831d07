"""Paceline: a device and a cloud write one answer together."""

__version__ = "0.1.0"
