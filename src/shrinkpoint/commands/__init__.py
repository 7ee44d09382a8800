"""The commands of the command line, a small group a module; what is heavy is imported when a command runs."""
