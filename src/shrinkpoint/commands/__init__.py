"""The commands of the command line; heavy modules are imported when a command runs."""
