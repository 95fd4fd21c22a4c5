"""Weights and vision share: the account alone, by step, and what comes out of a real loader."""
