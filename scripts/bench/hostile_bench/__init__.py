"""What scripts/bench/hostile.py is made of: attackers, the honest swarm beside them, and what is measured of it."""
