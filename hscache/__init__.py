"""Run a large target model once, keep its hidden states, train speculative-decoding drafters from disk."""

__version__ = "0.1.0"
