"""Mixtures of experts reduced for a task, to draft for the whole ones."""
