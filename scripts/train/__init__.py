"""Trains a tiny Nemotron-H that answers questions about Python's standard library.

``python -m scripts.train --output FILE`` writes the weights of the embedded model
``trained``; ``python -m scripts.train.check [FILE]`` counts its right answers.

``hybrids`` and ``recall`` train models of another kind, for ``scripts/bench.py coded``.
"""
