"""The parts of `scripts/make_tiny_model.py`: problems, tokenizer, supervised training, weakening."""
