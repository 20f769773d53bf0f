"""What people do who train and evaluate agents, step by step: a1 to a6 score many actions from one decision point, b1
to b13 let agents change a repository. Each file runs by itself: `python -m examples.users.a1_create`.
"""
