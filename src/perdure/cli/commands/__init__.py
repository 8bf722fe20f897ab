"""The commands, one a file. `perdure.cli.app` names them all."""
