"""Sub-commands of ``kvloop``: each module has ``add_parser(subparsers)`` and ``run(arguments) -> exit status``."""
