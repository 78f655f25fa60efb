"""Supervised fine-tuning: on demonstrations, and on the store's best episodes."""
