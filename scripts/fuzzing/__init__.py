"""Fuzzing of everything that parses bytes of strangers: `surfaces.py` says what, `run.py` how it is judged."""
