"""Commands for several machines."""
