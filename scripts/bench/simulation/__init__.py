"""The parts of `scripts/bench/sapo.py`: a swarm in one process, what is run on it, and what the results say."""
