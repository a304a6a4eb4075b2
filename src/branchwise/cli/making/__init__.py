"""Commands that make draft models out of others."""
