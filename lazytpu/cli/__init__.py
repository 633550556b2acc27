"""The command line: ``python -m lazytpu COMMAND``.

One file a command; `lazytpu.cli.app` puts them together.  Nothing here is imported by ``import lazytpu``.
"""
