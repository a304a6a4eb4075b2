"""Claims: what papers say of the methods, what we measure, and a verdict that follows from the interval.

table.py      the claims and the sweeps of the figures, read from data/claims.toml rows.py       a file of records: how
many tokens every method wrote, in how many passes, prompt by prompt measuring.py  the rows that the claims need,
measured one after another on one loaded model judging.py    ratios with intervals over prompts, and the rule that turns
them into verdicts page.py       docs/claims.md and the figures, as a function of records alone
"""
