"""Varied prompts for tests on a real model: chat, code, arithmetic, lists, other languages, copying."""

PROMPTS = [
    "Write a haiku about rivers.",
    "What is the capital of France, and why is it famous?",
    "Count from 1 to 20, separated by commas.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate to French: The cat sleeps on the warm stone wall.",
    "List five fruits and, for each, its usual colour.",
    "Repeat after me: red green blue red green blue red green blue",
    "Explain in two sentences how a bicycle stays upright.",
    "A farmer has 12 hens and each lays 5 eggs a week. How many eggs in 3 weeks? Show the steps.",
    "Fix the spelling: Teh quikc brown fox jumsp ovr the lazzy dog.",
    "Write a JSON object with the keys name, age and city for a person called Ada.",
    "Summarise: Water rises from the sea as vapour, gathers in clouds, falls as rain and runs back to the sea.",
    "Who was Marie Curie?",
    "Schreibe einen kurzen Satz über den Winter.",
    "What are the days of the week?",
    "Write an SQL query that selects all customers from Berlin.",
    "Tell a very short story about a lighthouse keeper and a gull.",
    "Give three reasons to learn the piano, as a numbered list.",
    "Complete: def add(a, b):\n    return",
    "こんにちは means hello. How do you say good night in Japanese? 🌙",
]
