"""The cache without a model: request traces, simulators and baselines."""
