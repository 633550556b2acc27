"""``python -m lazytpu``: see `lazytpu.cli`."""

from lazytpu.cli.app import main

main()
