"""Branchwise inside other engines, one folder each; nothing here is imported by the rest of the package."""
