"""Backends: what runs a target."""
