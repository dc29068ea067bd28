"""Trains a tiny Nemotron-H that answers questions about Python's standard library.

python -m scripts.train --minutes 50 --output trained
"""
