"""`python -m pd_cluster` is `pd-cluster`."""

from pd_cluster.commands.cli import main

main()
