"""What is run first on a machine with a GPU: `make gpu`, and `make gpu DEVICE=cpu` as its dry run."""
