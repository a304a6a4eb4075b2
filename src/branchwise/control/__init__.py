"""What drafting earns and what it costs: how many nodes pay, decided before every step.

costs     what a pass over so many rows costs, learned from the passes of generation
memory    the same, kept from one process to the next
trust     how often what a source promises comes true, learned from verdicts
choice    the size that gives most tokens a second, or nothing where drafting loses
guard     the same for any drafter, by the time of whole steps
"""
