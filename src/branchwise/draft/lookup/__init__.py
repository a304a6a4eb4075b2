"""Drafting without a model: continuations that are looked up."""
