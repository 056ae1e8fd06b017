"""Uploaded bytes to decoded RGB frames: fetching, limits, headers, decoding, content hashes."""
