"""Trains a tiny Nemotron-H that answers questions about Python's standard library.

``python -m scripts.train --minutes 50 --output DIRECTORY`` writes a model that a server takes as
``--model-path``; ``python -m scripts.train.check DIRECTORY`` counts its right answers.
"""
