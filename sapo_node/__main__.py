"""`python -m sapo_node`: the same as `sapo-node`."""

from sapo_node.cli import main

main()
