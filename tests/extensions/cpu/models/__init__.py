"""Tests of the tiny models."""
