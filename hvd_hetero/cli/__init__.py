"""The command `hvd-hetero` and its subcommands."""
