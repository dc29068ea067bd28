"""Schemas of prompts: their markup, their modules, and their tokens."""
