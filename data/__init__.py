"""Data sets: a script for each, and tokens and tokenizers. Nothing here knows the model."""
