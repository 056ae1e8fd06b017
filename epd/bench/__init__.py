"""Load generation and goodput reports over HTTP."""
