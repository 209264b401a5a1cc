"""Adapters for the libraries that models are trained and run with; each imports its own library alone.

``normswap.integrations.lightning``, ``.transformers``, ``.diffusers`` and ``.accelerate``.
"""
