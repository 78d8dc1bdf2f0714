"""The command line: one file a subcommand, registered in `main`."""
