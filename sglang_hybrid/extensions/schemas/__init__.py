"""Declared prompts: schemas, their modules and pins that clients name beforehand, and the linter.

A declaration is evidence that a prefix will come back. It decides where checkpoints are taken; it
never changes the tokens that the model reads.
"""
