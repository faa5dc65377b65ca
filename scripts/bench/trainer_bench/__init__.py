"""The parts of scripts/bench/trainer.py: who is measured, on what, and how."""
