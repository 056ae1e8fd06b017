"""Encode, prefill and decode as separately placed stages: the core, free of any serving framework."""

__version__ = "0.1.0"
