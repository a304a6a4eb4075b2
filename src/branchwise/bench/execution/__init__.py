"""Answers that are programs: run in a sandbox of their own, against the tests of their problem."""
