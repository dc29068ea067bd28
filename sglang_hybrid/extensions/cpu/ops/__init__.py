"""The Triton functions that SGLang calls while it serves a model, in plain torch."""
